"""What a device lets SPIR-V do."""

from __future__ import annotations

from dataclasses import dataclass

from .....schedules.capability import MatrixUnit


@dataclass(frozen=True)
class SpirvFeatures:
    """Device features that shape the code; the defaults are the portable baseline.

    `nan`, `denormals` and `round_even` are the float widths (of 16 and 32) for which the device
    reports SignedZeroInfNanPreserve, DenormPreserve and RoundingModeRTE, and sets each
    independently of the others. `exact_half` says that its conversions from f32 to f16 are known
    to round to nearest even. `matrix` are the cooperative matrices; `push_bytes` is the room for
    push constants.
    """

    storage16: bool = True
    storage8: bool = True
    int64: bool = True
    int16: bool = True
    int8: bool = True
    float16: bool = True
    shuffle: bool = False
    shuffle_relative: bool = False
    atomic_float32_add: bool = False
    nan: tuple[int, ...] = ()
    denormals: tuple[int, ...] = ()
    round_even: tuple[int, ...] = ()
    exact_half: bool = False
    matrix: tuple[MatrixUnit, ...] = ()
    push_bytes: int = 128


BASELINE = SpirvFeatures()
