"""What commands print: tables, JSON, progress. Progress goes to stderr, on a terminal only."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Report = Callable[[int, int], None]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """A table on stdout; not cut to a width where stdout is no terminal.

    `right` has a letter for each column, "r" for those aligned to the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if right[i : i + 1] == "r" else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def print_code(text: str, language: str) -> None:
    """Source text, coloured on a terminal."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, language, background_color="default"))


def note(text: str) -> None:
    """A line on stderr."""
    print(f"rudnn: {text}", file=sys.stderr)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Report]:
    """A bar while work goes on; the callable takes (done, total)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def waiting(label: str) -> Iterator[None]:
    """A spinner while something takes its time."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(label):
        yield


def bytes_text(count: float) -> str:
    """`1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def seconds_text(value: float) -> str:
    """`3.2 µs`, `1.25 ms`, `2.00 s`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 1000:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"
