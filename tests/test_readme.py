"""The README's snippets run, and its table says what the registry says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_code import PRODUCTS

import rudnn

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_quick_start_is_short_and_ends_in_an_assert() -> None:
    code = blocks("python")[0]
    lines = code.strip().splitlines()
    assert len(lines) <= 30 and lines[-1].startswith("assert")


@pytest.mark.parametrize("code", blocks("python"))
def test_python_snippets_run(code: str, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


COMMANDS = [c for block in blocks("sh") for c in block.strip().splitlines()]


def test_commands_run(tmp_path) -> None:
    """All of them, in order, in one folder that has the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    tools = tmp_path / "bin"
    tools.mkdir()
    script = tools / "rudnn"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rudnn.cli "$@"\n')
    script.chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z]+)", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


ROWS = re.findall(
    r"^\| `(rudnn\.\w+\.\w+)`[^|]*\| (\w*)\S* *\| ([^|]+) \| R \| R \| (E|E M) \| (E|E M) \|$",
    TEXT, re.M,
)  # fmt: skip


def test_table_tells_the_truth() -> None:
    assert len(ROWS) == 24
    from rudnn.ops.registry import operators

    declared = operators()
    for path, backward, dtypes, *gpus in ROWS:
        _, family, name = path.split(".")
        module = getattr(rudnn, family)
        assert callable(getattr(module, name))
        renamed = {"matmul": "batched_matmul", "DevicePlan": "paged_attention"}
        declaration = declared[renamed.get(name, name)]
        matrix = declaration.name in PRODUCTS
        assert all(("M" in g) == matrix for g in gpus), path
        assert backward.startswith("yes") == (declaration.backward is not None), path
        assert dtypes.split() == [t.short for t in declaration.dtypes], path
