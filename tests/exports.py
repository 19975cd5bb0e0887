"""Exported operators for tests: built by a C compiler, run, and what the oracle expects."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rudnn.dsl import In, Out, axes, bf16, f16, f32, op, sum
from rudnn.dsl.dtypes import BY_NAME, DType
from rudnn.dsl.oracle import evaluate
from rudnn.runtime.export import Request, export_operator, sample
from rudnn.runtime.targets.llvm import toolchain

WARNINGS = ("-Wall", "-Wextra", "-Werror")
TOLERANCE = {f32: 2e-5, f16: 2e-3, bf16: 1.6e-2}


@op(out=Out("*rows", "H"), example={"rows": (8,), "H": 16})
def shares(x: Any = In("*rows", "H")) -> Any:
    """x / Σ x over the rows: needs a workspace, and scratch memory besides."""
    r, h = axes("*rows", "H")
    s = axes("*rows")
    return x[r, h] / sum(x[s, h], over=s)


@op(out=Out("*rows", "H"), example={"rows": (8,), "H": 16}, name="shares")
def shares_of_squares(x: Any = In("*rows", "H")) -> Any:
    """x / (1 + Σ x² over the rows): the sums are in the workspace."""
    r, h = axes("*rows", "H")
    s = axes("*rows")
    return x[r, h] / (1.0 + sum(x[s, h] * x[s, h], over=s))


@dataclass
class Exported:
    """An exported operator and how it was asked for."""

    declaration: Any
    folder: Path
    manifest: dict[str, Any]
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    def host(self) -> Path:
        """The example host, built by its documented command with every warning an error."""
        made = self.folder / f"{self.name}_host"
        if not made.exists():
            build_host(self.manifest, self.folder)
        return made

    def run(self, *arguments: str) -> str:
        return execute([self.host(), *arguments, "--out", self.folder])

    def sizes(self, **given: int) -> dict[str, int]:
        """Sizes of all dims; a dynamic one not given has its example size."""
        dims = self.manifest["dims"]
        fixed = {d["name"]: d["size"] for d in dims if d["size"] != "dynamic"}
        return {d["name"]: d["example"] for d in dims} | fixed | given

    def shape(self, tensor: dict[str, Any], sizes: dict[str, int]) -> list[int]:
        return [e if isinstance(e, int) else sizes[e] for e in tensor["shape"]]

    def inputs(self, **given: int) -> dict[str, Any]:
        """The host's own example inputs."""
        made, sizes = {}, self.sizes(**given)
        tensors = [t for t in self.manifest["tensors"] if t["role"] == "input"]
        for seed, tensor in enumerate(tensors, 1):
            shape = self.shape(tensor, sizes)
            below = sizes.get(tensor["values_below"], 0)
            flat = sample(int(np.prod(shape)), seed, BY_NAME[tensor["dtype"]], below)
            made[tensor["name"]] = flat.reshape(shape)
        return made

    def results(self, **given: int) -> dict[str, Any]:
        """What the host wrote."""
        made, sizes = {}, self.sizes(**given)
        for tensor in self.manifest["tensors"]:
            if tensor["role"] == "output":
                dtype = BY_NAME[tensor["dtype"]].numpy
                raw = np.frombuffer((self.folder / f"{tensor['name']}.bin").read_bytes(), dtype)
                made[tensor["name"]] = raw.reshape(self.shape(tensor, sizes))
        return made

    def expected(
        self, inputs: dict[str, Any], scalars: dict[str, float] | None = None, /, **given: int
    ) -> tuple[Any, ...]:
        """The float64 oracle's results."""
        asked = self.asked
        request = Request(self.declaration, dict(asked.get("ranks", {})))
        spec = request.spec(
            dict(asked.get("dims", {})), asked.get("dtype"), asked.get("options", {}),
            asked.get("present", ()), asked.get("dtypes", {}),
        )  # fmt: skip
        sizes = self.sizes(**given)
        numbers = {d["slot"]: sizes[d["name"]] for d in self.manifest["dims"]}
        numbers |= {s["name"]: s["default"] for s in self.manifest["scalars"]}
        numbers |= scalars or {}
        return evaluate(self.declaration.trace(spec), inputs, numbers, precision="float64")


def execute(command: list[Any]) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def compile_c(arguments: list[Any], folder: Path) -> None:
    compiler = toolchain.find_compiler()
    assert compiler is not None
    command = [*compiler, *(str(a) for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr


def build_host(manifest: dict[str, Any], folder: Path, *flags: str) -> None:
    """Run the command that the manifest documents, every warning an error."""
    command = manifest["build"].split()
    assert command[0] == "cc"
    compile_c([*WARNINGS, *flags, *command[1:]], folder)


def run_host(folder: Path, name: str, *arguments: str, code: int = 0, **environment: str) -> str:
    """What the host prints, which must end with `code`."""
    done = subprocess.run(
        [f"./{name}_host", *arguments], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def exported(folder: Path, declaration: Any, **asked: Any) -> Exported:
    return Exported(
        declaration, folder, export_operator(declaration, folder=folder, **asked), asked
    )


def compare(got: Any, wanted: Any, dtype: DType) -> None:
    limit = TOLERANCE[dtype]
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=limit, atol=limit)
