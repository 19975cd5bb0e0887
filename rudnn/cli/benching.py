"""`bench`."""

from __future__ import annotations

from .output import note, print_json, print_table, progress, seconds_text


def bench(suite: str | None, against: str | None, threads: int, as_json: bool) -> int:
    """Measure; 1 if a case was wrong and left out."""
    from ..bench import run

    with progress("measuring") as report:
        outcome = run(suite, against, threads, report=report)
    for problem in (*outcome.skipped, *outcome.wrong, *outcome.noisy):
        note(problem)
    if as_json:
        print_json([r.to_json() for r in outcome.results])
        return 1 if outcome.wrong else 0
    rows = [
        (r.op, r.case, r.target, r.dtype, seconds_text(r.ours_s), r.peer or "",
         "" if r.peer_s is None else seconds_text(r.peer_s),
         "" if r.ratio is None else f"{r.ratio:.2f}",
         "" if r.floor_share is None else f"{r.floor_share:.0%}")
        for r in outcome.results
    ]  # fmt: skip
    columns = ("op", "case", "target", "dtype", "ours", "peer", "peer's", "ratio", "of the floor")
    print_table(columns, rows, "llllrlrrr")
    return 1 if outcome.wrong else 0
