"""The commands and their options; the work is in the modules beside this one, loaded when used."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(
    name="rudnn",
    help="Declare a neural-network operator once; run, check and embed it on every target.",
    add_completion=False,
    rich_markup_mode=None,
)
cache_app = typer.Typer(help="The compile cache on disk.", rich_markup_mode=None)
app.add_typer(cache_app, name="cache")


class View(str, Enum):
    """What `show` shows."""

    math = "math"
    tir = "tir"
    source = "source"
    graph = "graph"


class Peer(str, Enum):
    """What `bench` measures against."""

    torch = "torch"


Texts = Optional[list[str]]  # noqa: UP045  typer evaluates annotations on Python 3.10 too
Operator = Annotated[str, typer.Argument(metavar="OP|FILE.py:OP", help="An operator.")]
Dims = Annotated[Texts, typer.Option("--dim", metavar="NAME=N", help="A size; a pack's as 3x5.")]
ExportDims = Annotated[
    Texts, typer.Option("--dim", metavar="NAME=N|NAME=dynamic", help="A size; a pack's as 3x5.")
]
Options = Annotated[
    Texts, typer.Option("--option", metavar="NAME=VALUE", help="A compile-time choice.")
]
DTypeName = Annotated[
    Optional[str], typer.Option("--dtype", metavar="D", help="f32, f16 or bf16.")  # noqa: UP045
]
Target = Annotated[
    str, typer.Option("--target", metavar="T", help="A target, such as llvm or llvm:x86-64-v3.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"rudnn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare a neural-network operator once; run, check and embed it on every target."""


@app.command()
def ops(json: Json = False) -> int:
    """List the operators."""
    from . import listing

    return listing.ops(json)


@app.command()
def doctor(json: Json = False) -> int:
    """Say what works here and how to mend the rest."""
    from . import listing

    return listing.doctor(json)


@app.command()
def show(
    operator: Operator,
    view: Annotated[View, typer.Option("--as", help="How to show it.")] = View.math,
    dim: Dims = None,
    dtype: DTypeName = None,
    option: Options = None,
    target: Target = "llvm",
) -> int:
    """Show an operator: math, TIR, source, kernels.

    Sizes are the declaration's example; every optional input is there.
    """
    from . import show as work

    return work.show(operator, view.value, dim, dtype, option, target)


@app.command(name="compile")
def compile_(
    operator: Operator,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to.")],
    target: Target = "llvm",
    dim: ExportDims = None,
    dtype: DTypeName = None,
    option: Options = None,
    present: Annotated[
        Texts, typer.Option("--with", metavar="INPUT", help="An optional input to have.")
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--name", help="Of the C function and the files."),
    ] = None,
    json: Json = False,
) -> int:
    """Leave an object file, a header and a C host.

    A dim not named is dynamic where the operator allows it, else has the declaration's example
    size. NAME=dynamic asks for that, NAME=N compiles the size in.
    """
    from . import work

    return work.export(operator, output, target, dim, dtype, option, present, name, json)


@app.command()
def run(
    operator: Operator,
    inputs: Annotated[
        Texts, typer.Option("--input", metavar="[NAME=]FILE.npy", help="Inputs, in order.")
    ] = None,
    param: Annotated[
        Texts, typer.Option("--param", metavar="NAME=VALUE", help="A number or a choice.")
    ] = None,
    output: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option("--output", "-o", metavar="FILE.npy", help="Where results go."),
    ] = None,
) -> int:
    """Run an operator on arrays in .npy files."""
    from . import work

    return work.run(operator, inputs or [], param, output or [])


@app.command()
def check(
    operator: Operator,
    target: Target = "llvm",
    dim: Dims = None,
    dtype: Annotated[
        Texts, typer.Option("--dtype", metavar="D", help="A dtype to try; default: all.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random arguments.")] = 0,
    json: Json = False,
) -> int:
    """Compare an operator with its oracle and torch.

    Every dtype, layout and size is tried; a backward, against numeric gradients and autograd.
    Exit code 1 if a comparison fails.
    """
    from . import work

    return work.check(operator, target, dim, dtype, seed, json)


@app.command()
def bench(
    suite: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--suite", metavar="NAME", help="One suite; default: all."),
    ] = None,
    against: Annotated[Optional[Peer], typer.Option("--against", help="The peer.")] = None,  # noqa: UP045
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of both sides.")] = 2,
    json: Json = False,
) -> int:
    """Time our kernels beside torch's.

    Both run in turn in one process, with the same number of threads; times are medians.
    Exit code 1 if a result is wrong: such a case is not reported.
    """
    from . import benching

    return benching.bench(suite, against.value if against else None, threads, json)


@app.command()
def serve(
    host: Annotated[str, typer.Option("--host", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any.")] = 3000,
    kernel: Annotated[
        str, typer.Option("--kernel", metavar="NAME", help="dense or flash.")
    ] = "flash",
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Refuse requests that ask for another kernel.")
    ] = False,
    weights: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--weights", metavar="FILE", help="query, key, value in a .npz or .safetensors file."
        ),
    ] = None,
    dim: Annotated[int, typer.Option("--dim", help="Numbers in a row, without a file.")] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the weights, without a file.")] = 0,
    store: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--store", metavar="PATH", help="A SQLite file; default: in memory."),
    ] = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--device", metavar="NAME", help="Such as vulkan:0; default: the CPU."),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", help="Processes; they need --store.")] = 1,
    window: Annotated[
        float, typer.Option("--window-ms", help="How long a request waits for others.")
    ] = 1.0,
    max_rows: Annotated[int, typer.Option("--max-rows", help="Of a request.")] = 1024,
    max_body: Annotated[int, typer.Option("--max-body", help="Bytes of a request.")] = 8 << 20,
    queue_rows: Annotated[int, typer.Option("--queue-rows", help="Most that wait.")] = 65536,
) -> int:
    """Serve attention over HTTP until told to stop.

    POST /process, GET /retrieve, /health, /metrics, /docs, and a page at /. Needs the extra
    `serve`.
    """
    from . import serve as work

    return work.serve(
        host, port, kernel=kernel, pinned=pinned, weights=weights, dim=dim, seed=seed, store=store,
        device=device, workers=workers, window=window / 1000, max_rows=max_rows,
        max_body=max_body, queue_rows=queue_rows,
    )  # fmt: skip


@cache_app.command(name="list")
def cache_list(json: Json = False) -> int:
    """List the compiled kernels."""
    from . import listing

    return listing.cache_list(json)


@cache_app.command(name="clear")
def cache_clear() -> int:
    """Remove all compiled kernels."""
    from . import listing

    return listing.cache_clear()
