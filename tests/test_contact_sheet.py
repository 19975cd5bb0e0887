"""The photograph example: every resize, warp and filter against torch, and the sheet it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from contact_sheet import filters

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contact_sheet", *arguments]
    return subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)


def test_sheet_is_written_and_agrees_with_torch(tmp_path: Path) -> None:
    done = run("-o", str(tmp_path / "sheet.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    for mode, *_ in filters.RESIZES:
        assert f"enlarged, {mode}" in done.stdout and f"reduced, {mode}" in done.stdout
    assert "too large" not in done.stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert min(sheet.size) > 4 * filters.TILE
        assert len(sheet.convert("RGB").getcolors(2**24)) > 10_000  # a photograph, not a blank


def test_a_wrong_pixel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contact_sheet import __main__ as program

    def spoilt(photo):
        entry = filters.depthwise("spoilt", filters.shrink(photo), filters.gaussian())
        theirs = entry.theirs()
        theirs[0, 1, 5, 5] = float("nan")
        yield filters.Entry("spoilt", entry.ours, lambda: theirs)

    monkeypatch.setattr(program, "entries", spoilt)
    monkeypatch.setattr(sys, "argv", ["contact_sheet", "-o", str(tmp_path / "sheet.png")])
    assert program.main() == 1


def test_bad_arguments_are_told(tmp_path: Path) -> None:
    done = run("-o", str(tmp_path / "none" / "sheet.png"))
    assert done.returncode == 2 and "needs a folder that is there" in done.stderr
    done = run("--target", "cuda:7", "-o", str(tmp_path / "sheet.png"))
    assert done.returncode == 2 and "contact_sheet:" in done.stderr
