"""Attention over HTTP: project → score → aggregate → deliver.

`kernels` holds the scoring stage by name, `pipeline` the stages around it; neither needs the
`serve` extra, which `app` and `server` do. From the command line: `rudnn serve`.
"""

from __future__ import annotations

from ..dsl.errors import ServiceError
from .kernels import Kernel, Scores, kernel_named, kernel_names, register
from .pipeline import attend, attention_map
from .projections import Projections
from .settings import Settings

__all__ = [
    "Kernel", "Projections", "Scores", "ServiceError", "Settings", "attend", "attention_map",
    "kernel_named", "kernel_names", "register",
]  # fmt: skip
