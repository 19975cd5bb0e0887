"""Settings of all tests."""

from __future__ import annotations

import os

# Before anything makes the Vulkan instance: what its validation layer says fails a test.
os.environ.setdefault("RUDNN_VULKAN_VALIDATION", "1")
