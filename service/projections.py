"""The projection weights: from a file, or drawn from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..dsl.errors import ServiceError, require_host
from ..nn import PackedWeight

Array = np.ndarray[Any, Any]
NAMES = ("query", "key", "value")
LARGEST_WIDTH = 512

_need = partial(require_host, error=ServiceError)


@dataclass(frozen=True, eq=False)
class Projections:
    """query [d, D], key [d, D] and value [d, E], f32: a row x becomes x·query, and so on.

    Raises ServiceError for shapes that do not fit, widths past 512 and numbers that are not finite.
    """

    query: Array
    key: Array
    value: Array

    def __post_init__(self) -> None:
        for name in NAMES:
            weight = np.asarray(getattr(self, name))
            sizes = list(weight.shape)
            _need(weight.ndim == 2 and weight.dtype.kind in "fV",  # V: bfloat16
                  f"a floating-point matrix for {name}", f"{weight.dtype}{sizes}")  # fmt: skip
            _need(min(sizes) >= 1 and max(sizes) <= LARGEST_WIDTH,
                  f"widths from 1 to {LARGEST_WIDTH}", f"{name} {sizes}")  # fmt: skip
            _need(sizes[0] == len(self.query), f"{len(self.query)} rows, as query has",
                  f"{name} {sizes}")  # fmt: skip
            weight = np.ascontiguousarray(weight, np.float32)
            _need(bool(np.isfinite(weight).all()), f"finite f32 weights in {name}",
                  "NaN or infinity")  # fmt: skip
            object.__setattr__(self, name, weight)
        _need(self.query.shape == self.key.shape, "query and key of one shape",
              f"{list(self.query.shape)} and {list(self.key.shape)}")  # fmt: skip

    @classmethod
    def seeded(cls, dim: int, seed: int) -> Projections:
        """Normal weights of deviation 1/√dim, each [dim, dim]."""
        _need(1 <= dim <= LARGEST_WIDTH, f"a width from 1 to {LARGEST_WIDTH}", dim)
        random = np.random.default_rng(seed)
        return cls(*(random.standard_normal((dim, dim)) / math.sqrt(dim) for _ in NAMES))

    @classmethod
    def load(cls, path: Path) -> Projections:
        """The tensors `query`, `key` and `value` of a .npz or .safetensors file.

        Raises ServiceError, also for a file that cannot be read.
        """
        readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
        suffix = path.suffix.lower()
        _need(suffix in readers, "weights in a .npz or .safetensors file", path.name)
        try:
            found = readers[suffix](path)
        except ServiceError:
            raise
        except Exception as error:  # each format's reader has errors of its own
            raise ServiceError(f"needs weights that can be read, got {path}: {error}") from error
        missing = [name for name in NAMES if name not in found]
        _need(not missing, f"tensors {', '.join(NAMES)} in {path}",
              f"none named {', '.join(missing)}")  # fmt: skip
        return cls(*(found[name] for name in NAMES))

    @property
    def dim(self) -> int:
        """d, the numbers in a row."""
        return int(self.query.shape[0])

    @property
    def value_dim(self) -> int:
        """E, the numbers in a row of the result."""
        return int(self.value.shape[1])

    @property
    def scale(self) -> float:
        """1/√d, of the input's width."""
        return 1 / math.sqrt(self.dim)

    def packed(self, place: Any) -> PackedWeight:
        """All three as one weight [2D + E, d], where `place` puts it."""
        joined = np.concatenate([self.query, self.key, self.value], axis=1).T
        return PackedWeight(place(np.ascontiguousarray(joined)))

    @cached_property
    def largest_input(self) -> float:
        """A magnitude of the input up to which nothing overflows in f32.

        With |x| ≤ m a projection stays below m·Σ|w| of its column and a score below the product of
        two such, summed over D: bounds on every partial sum too. Half of it is for rounding.
        """
        columns = [float(np.abs(w.astype(np.float64)).sum(0).max())
                   for w in (self.query, self.key, self.value)]  # fmt: skip
        most = float(np.finfo(np.float32).max) / 2
        depth = self.query.shape[1]
        bounds = [most / c for c in columns if c]
        if columns[0] and columns[1]:
            bounds.append(math.sqrt(most / depth / columns[0] / columns[1]))
        return min([most, *bounds])


def _read_npz(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in NAMES if name in archive.files}


def _read_safetensors(path: Path) -> dict[str, Array]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ServiceError("a .safetensors file needs pip install 'rudnn[serve]'") from None
    import ml_dtypes  # noqa: F401  NumPy then has bfloat16

    with safe_open(str(path), framework="numpy") as archive:
        return {name: archive.get_tensor(name) for name in NAMES if name in archive.keys()}  # noqa: SIM118
