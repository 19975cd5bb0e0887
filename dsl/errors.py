"""Typed errors, one class per family under `RudnnError`.

Every message says what was needed and what came: `needs Hq divisible by Hkv, got Hq=6, Hkv=4`.
"""

from __future__ import annotations


class RudnnError(ValueError):
    """Base of every error the package raises on purpose."""


class DeclarationError(RudnnError):
    """An operator declaration is malformed (raised to the author of the operator)."""


class DeviceError(RudnnError):
    """Tensors of one call on different devices or queues, or an unknown device."""


class OutOfMemoryError(DeviceError):
    """A device has not enough memory left; the message says how much was asked for."""


class DeviceLostError(DeviceError):
    """A device stopped answering; nothing more runs on it in this process."""


class DeviceTimeoutError(DeviceError):
    """Work on a device did not finish in the time allowed."""


class TargetError(RudnnError):
    """A target that is unknown, or whose compiler or driver is missing."""


class CompileError(RudnnError):
    """A kernel could not be built."""


class LoadError(RudnnError):
    """A kernel file that cannot be loaded; building it again may help."""


class LaunchError(RudnnError):
    """A kernel reported a fault; the message names it."""


class WorkspaceError(RudnnError):
    """A workspace request over its budget."""


class OperatorError(RudnnError):
    """Bad arguments to an operator that belongs to no family of its own."""


class NormalizationError(RudnnError):
    """Bad arguments to `rudnn.normalization`."""


class NNError(RudnnError):
    """Bad arguments to `rudnn.nn`."""


class AttentionError(RudnnError):
    """Bad arguments to `rudnn.attention`, or a strategy the device cannot run."""


class PagedAttentionError(RudnnError):
    """Bad arguments to `rudnn.paged_attention`, or a plan that does not go with them."""


class ConvError(RudnnError):
    """Bad arguments to `rudnn.convolution`, or a strategy the device cannot run."""


class PoolingError(RudnnError):
    """Bad arguments to `rudnn.pooling`."""


class InterpolationError(RudnnError):
    """Bad arguments to `rudnn.interpolation`."""


class GridSamplingError(RudnnError):
    """Bad arguments to `rudnn.grid_sampling`."""


class CtcError(RudnnError):
    """Bad arguments to `rudnn.ctc`."""


class ServiceError(RudnnError):
    """Settings, weights, a store or a request that the attention service cannot use."""


def require_host(condition: bool, needs: str, got: object, error: type[RudnnError]) -> None:
    """Raise `error("needs …, got …")` unless `condition` holds."""
    if not condition:
        raise error(f"needs {needs}, got {got}")
