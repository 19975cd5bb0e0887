"""The benchmark: our kernels and torch's in turn in one process, medians, and the floor.

Both sides get the same arrays and threads, and both allocate their results. Each side is called
twice in a row and the second call is timed: the other side's threads go on spinning for a while
after its last call, and the caches hold its data. A case whose result is not the peer's is not
reported.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from .bench_calls import face, peer
from .bench_cases import CASES, MINILM, SUITES, BenchCase
from .dsl.dtypes import DType, bool_, f32, i32
from .dsl.errors import RudnnError

Call = Callable[[], Any]

_SECONDS = 2.0  # measured for each case
_FEWEST, _MOST = 7, 200  # pairs
_SAMPLE = 100e-6  # seconds; shorter calls are timed several at a time
# Seconds of calls before those timed in a turn: OpenMP's threads go on spinning for some
# milliseconds after the peer's last call, on a core that our next call needs.
_SETTLE = 10e-3
_TOLERANCE = 1e-4
_NOISY = 1.5  # median over least
_BUSY = 0.7  # load average before we began


class BenchError(RudnnError):
    """A suite that does not exist or cannot run here."""


@dataclass(frozen=True)
class Result:
    """One case; times are medians in seconds. `ratio` is peer_s / ours_s.

    `floor_share` is the least time the machine could need, by measured bandwidth and arithmetic
    rate, over ours.
    """

    op: str
    case: str
    target: str
    dtype: str
    ours_s: float
    peer: str | None
    peer_s: float | None
    ratio: float | None
    floor_share: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """Results, and one line for each case that was `wrong`, `skipped` or doubtful (`noisy`)."""

    results: list[Result]
    wrong: list[str]
    skipped: list[str]
    noisy: list[str]


@dataclass(frozen=True)
class Times:
    """Median seconds of a call of either side; `spread` is the greater median over its least."""

    ours: float
    peer: float | None
    spread: float


def run(
    suite: str | None = None, against: str | None = None, threads: int = 2,
    *, seconds: float | None = None, report: Callable[[int, int], None] | None = None,
) -> Outcome:  # fmt: skip
    """Measure the cases of a suite (None: all) on `threads` threads, for `seconds` each.

    Needs to be the first use of a kernel in the process: the number of threads is fixed then.
    Raises BenchError.
    """
    if suite is not None and suite not in SUITES:
        raise BenchError(f"needs a suite among {', '.join(SUITES)}, got {suite}")
    if against == "torch" and not _has("torch"):
        raise BenchError("--against torch needs torch: pip install torch")
    os.environ["RUDNN_NUM_THREADS"] = str(threads)
    if _has("torch"):
        import torch

        torch.set_num_threads(threads)
    seconds = _SECONDS if seconds is None else seconds
    chosen = [c for c in CASES if suite in (None, c.suite)]
    outcome = Outcome([], [], [], [])
    if not _has("torch"):
        without = [c for c in chosen if c.nbytes is not None]
        outcome.skipped.extend(f"{c.op} {c.case} needs pip install torch" for c in without)
        chosen = [c for c in chosen if c.nbytes is None]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > _BUSY:
        outcome.noisy.append(f"doubtful, the load average was {load:.1f} at the start")
    total = len(chosen) + (suite in (None, MINILM))
    for i, case in enumerate(chosen):
        if report is not None:
            report(i, total)
        work = partial(measure, case, against, seconds)
        _into(outcome, f"{case.op} {case.case}", work)
    if suite in (None, MINILM):
        missing = _minilm_missing()
        if missing is None:
            _into(outcome, MINILM, partial(measure_minilm, seconds))
        elif suite == MINILM:
            raise BenchError(missing)
        else:
            outcome.skipped.append(missing)
    return outcome


def _into(outcome: Outcome, label: str, work: Callable[[], tuple[Result, Times]]) -> None:
    try:
        result, times = work()
    except WrongResult as wrong:
        outcome.wrong.append(f"{label}: not reported, {wrong}")
        return
    outcome.results.append(result)
    if times.spread > _NOISY:
        outcome.noisy.append(
            f"{label}: doubtful, a median is {times.spread:.1f} times the least time: "
            "is the machine busy?"
        )


class WrongResult(Exception):
    """Our result is not the peer's."""


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def measure(case: BenchCase, against: str | None, seconds: float) -> tuple[Result, Times]:
    """One case; raises WrongResult."""
    made = inputs(case)
    ours, theirs = _ours(case, made), _theirs(case, made)
    _compare(ours(), theirs() if theirs is not None else _oracle(case, made))
    if case.numpy or against is None:
        theirs = None
    times = pair(ours, theirs, seconds)
    share = floor(case) / times.ours if _has("torch") and not case.numpy else None
    return _result(case.op, case.case, times, share), times


def _result(op: str, case: str, times: Times, share: float | None) -> Result:
    named = "torch" if times.peer is not None else None
    ratio = times.peer / times.ours if times.peer is not None else None
    return Result(op, case, "llvm", f32.short, times.ours, named, times.peer, ratio, share)


# --- the two sides ---


def inputs(case: BenchCase) -> dict[str, np.ndarray[Any, Any]]:
    """Normal numbers; weights scaled so that results stay near 1, grids of points inside."""
    random = np.random.default_rng(0)
    made: dict[str, np.ndarray[Any, Any]]
    made = {n: random.standard_normal(s, np.float32) for n, s in case.shapes.items()}
    for name, (low, high) in case.integers.items():
        made[name] = random.integers(low, high, case.shapes[name]).astype(np.int32)
    if "weight" in made:
        made["weight"] /= np.float32(math.sqrt(made["weight"].shape[1]))
    if "grid" in made:
        made["grid"] = random.uniform(-1, 1, made["grid"].shape).astype(np.float32)
    if "mask" in made:
        batch, *_, keys = made["mask"].shape
        kept = keys - 8 * np.arange(batch).reshape(-1, 1, 1, 1)
        made["mask"] = np.arange(keys) < kept
    return made


def _tensors(made: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    import torch

    return {n: torch.from_numpy(a) for n, a in made.items()}


def _ours(case: BenchCase, made: dict[str, np.ndarray[Any, Any]]) -> Call:
    arrays: dict[str, Any] = dict(made)
    if _has("torch") and not case.numpy:
        arrays = _tensors(made)
    if case.packed:
        from .nn import PackedWeight

        arrays["weight"] = PackedWeight(arrays["weight"])
    function, settings = face(case.op), case.settings
    if len(arrays) == 1 and not settings:  # the overhead of `**` is not the operator's
        (only,) = arrays.values()
        return lambda: function(only)
    return lambda: function(**arrays, **settings)


def _theirs(case: BenchCase, made: dict[str, np.ndarray[Any, Any]]) -> Call | None:
    function = peer(case.op)
    if function is None or not _has("torch"):
        return None
    arguments: dict[str, Any] = _tensors(made) | case.settings
    return lambda: function(arguments)


def _oracle(case: BenchCase, made: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The result without torch at hand, from the declaration's oracle in f32."""
    from .dsl.oracle import evaluate

    bound = _bound(case)
    known = {n: made[n].reshape(v.shape) for n, v in bound.views.items() if n in made}
    found = evaluate(bound.graph, known, dict(bound.sizes) | case.settings)
    shaped = [f.reshape(shape) for f, (_, shape, _) in zip(found, bound.results, strict=True)]
    return shaped[0] if len(shaped) == 1 else tuple(shaped)


def _compare(got: Any, want: Any) -> None:
    if isinstance(got, tuple):
        for one, other in zip(got, want, strict=True):
            _compare(one, other)
        return
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape:
        raise WrongResult(f"shape {a.shape} where the peer has {b.shape}")
    error = float((np.abs(a - b) / (np.abs(b) + np.abs(b).mean())).max())
    if not error <= _TOLERANCE:
        raise WrongResult(f"relative error {error:.1e} > {_TOLERANCE:.0e}")


# --- timing ---


def pair(ours: Call, theirs: Call | None, seconds: float) -> Times:
    """The times of both sides."""
    times = timings([ours] if theirs is None else [ours, theirs], seconds)
    medians = [statistics.median(t) for t in times]
    spread = max(m / min(t) for m, t in zip(medians, times, strict=True))
    return Times(medians[0], medians[1] if theirs is not None else None, spread)


def timings(sides: Sequence[Call], seconds: float) -> list[list[float]]:
    """Seconds of calls of each side, made in turn for about `seconds` in all."""
    guesses = [[_once(call, 1) for _ in range(3)][-1] for call in sides]
    counts = [max(1, math.ceil(_SAMPLE / max(g, 1e-9))) for g in guesses]
    each = sum(_SETTLE + 2 * g * n for g, n in zip(guesses, counts, strict=True))
    pairs = min(max(int(seconds / max(each, 1e-9)), _FEWEST), _MOST)
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(pairs):
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for i in order:
            _settle(sides[i])
            times[i].append(_once(sides[i], counts[i]))
    return times


def _settle(call: Call) -> None:
    end = time.perf_counter() + _SETTLE
    call()
    while time.perf_counter() < end:
        call()


def _once(call: Call, count: int) -> float:
    """Seconds of a call, the mean of `count` in a row."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


# --- the floor: rates are the best seen, not medians, for no call can be quicker ---


def floor(case: BenchCase) -> float:
    """Seconds that reading each input, writing each result and the arithmetic need at least."""
    from .dsl.cost import flops, minimal_bytes

    if case.nbytes is not None:
        return case.nbytes / copy_rate(case.nbytes)
    bound = _bound(case)
    nbytes = minimal_bytes(bound.graph, bound.sizes)
    return max(nbytes / copy_rate(nbytes), flops(bound.graph, bound.sizes) / fma_rate())


def _dtype(case: BenchCase, name: str) -> DType:
    return i32 if name in case.integers else bool_ if name == "mask" else f32


def _bound(case: BenchCase) -> Any:
    from .ops.registry import operators
    from .runtime.bind import Binder, View, contiguous
    from .samples import numbers_of

    declaration = operators()[case.op]
    views = {n: View(_dtype(case, n), s, contiguous(s)) for n, s in case.shapes.items()}
    chosen = {n: case.settings.get(n, o.default) for n, o in declaration.options.items()}
    numbers = numbers_of(declaration) | {
        n: v for n, v in case.settings.items() if n in declaration.params
    }
    extents = {n: int(case.settings.get(n, e.default or 0)) for n, e in declaration.extents.items()}
    return Binder(declaration).bind(views, numbers, chosen, extents, {})


@lru_cache(maxsize=64)
def copy_rate(nbytes: int) -> float:
    """Bytes per second, reads and writes together, of a copy that moves `nbytes`."""
    import torch

    source = torch.ones(max(nbytes // 8, 1), dtype=torch.float32)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / min(timings([lambda: target.copy_(source)], 0.3)[0])


@lru_cache(maxsize=1)
def fma_rate() -> float:
    """Floating-point operations per second of the quickest matrix product here, ours or torch's."""
    import torch

    from .nn import PackedWeight, linear

    rates = []
    for size in (1024, 2048):
        a = torch.ones(size, size) / size
        packed = PackedWeight(a)
        sides: list[Call] = [lambda a=a: a @ a, lambda a=a, w=packed: linear(a, w)]  # type: ignore[misc]
        rates += [2.0 * size**3 / min(t) for t in timings(sides, 1.0)]
    return max(rates)


# --- MiniLM ---


def _minilm_missing() -> str | None:
    """None where the MiniLM example, its weights and torch are there, else what to do."""
    examples = Path.cwd() / "examples"
    if (examples / "minilm" / "checkpoint.py").is_file() and str(examples) not in sys.path:
        sys.path.append(str(examples))
    if not (_has("minilm") and _has("minilm.checkpoint")):
        return "the minilm suite needs the example: run it in a checkout of rudnn, at its root"
    wanted = {"torch": "torch", "safetensors": "safetensors", "tokenizers": "tokenizers"}
    missing = [package for module, package in wanted.items() if not _has(module)]
    if missing:
        return f"the minilm suite needs pip install {' '.join(missing)}"
    checkpoint = importlib.import_module("minilm.checkpoint")
    try:
        checkpoint.load(checkpoint.bundled_model())
    except checkpoint.CheckpointError as error:
        return f"the minilm suite needs its weights: {error}"
    return None


def measure_minilm(seconds: float) -> tuple[Result, Times]:
    """The encoder on 32 × 64 tokens without padding; raises WrongResult."""
    from minilm.checkpoint import bundled_model, load  # type: ignore[import-not-found]
    from minilm.encoder import Encoder  # type: ignore[import-not-found]
    from minilm.reference import Reference  # type: ignore[import-not-found]

    checkpoint = load(bundled_model())
    ours = Encoder(checkpoint.weights, checkpoint.config)
    theirs = Reference(checkpoint.weights, checkpoint.config)
    ids, keep = checkpoint.tokenize(["Each of the sentences is a row of the batch."])
    ids, keep = np.resize(ids[keep], (32, 64)), np.ones((32, 64), bool)
    _compare(ours(ids, keep), theirs(ids, keep))
    times = pair(lambda: ours(ids, keep), lambda: theirs(ids, keep), seconds)
    return _result("minilm", "32×64 tokens", times, None), times


__all__: Sequence[str] = ("BenchError", "Outcome", "Result", "run")
