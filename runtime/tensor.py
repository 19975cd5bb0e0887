"""`rudnn.Tensor`: an array on a device, with the queue its work is ordered on."""

from __future__ import annotations


def live_bytes() -> int:
    """Bytes held by live tensors."""
    return 0
