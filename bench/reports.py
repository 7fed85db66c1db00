"""``report({"loss": x, "k": k})`` in a tight loop, from all workers at once.

Two rates: what ``report`` lets a worker do, and what reaches the run's history, from the first report to the
return of ``fit()``.
"""

from __future__ import annotations

import json

from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.sides import BenchError, Drive, Side

TITLE = "report() from all workers, reports a second of each"
ROUNDS, PEER_ROUNDS = 3, 1


def measure(options: Options) -> Outcome:
    ours: tuple[list[float], list[float]] = ([], [])
    theirs: tuple[list[float], list[float]] = ([], [])
    for at in range(max(options.rounds, options.peer_rounds)):
        if at < options.rounds:
            _round("everstep", options.reports, options, ours)
            options.say(f"reports: everstep: {at + 1} of {options.rounds}: {ours[0][-1]:,.0f} a second")
        if at < options.peer_rounds:
            _round("ray", options.peer_reports, options, theirs)
            options.say(f"reports: ray: {at + 1} of {options.peer_rounds}: {theirs[0][-1]:.2f} a second")
    rows = (
        Row(
            f"report() in each of {options.workers} workers",
            "/s",
            Sample(tuple(ours[0])),
            Sample(tuple(theirs[0])) if theirs[0] else None,
        ),
        # Of Ray Train's few reports, which it doesn't keep, this would only time the end of the run.
        Row("the same, until it is all in the result", "/s", Sample(tuple(ours[1]))),
    )
    notes = [
        f"Everstep: {options.reports:,} reports of each worker; rank 0's all in the result, in order: "
        "checked in each round"
    ]
    if options.peer_rounds:
        notes.append(
            f"Ray Train: {options.peer_reports} reports of each worker; those without a checkpoint aren't in "
            "its result"
        )
    return Outcome("reports", TITLE, rows, tuple(notes))


def _round(side: Side, count: int, options: Options, into: tuple[list[float], list[float]]) -> None:
    with Drive(side, "reporting:report_many", {"reports": count}, options.workers, torch=False) as drive:
        outcome = drive.outcome()
        ranks = [
            json.loads((drive.folder / f"rank-{rank}.json").read_bytes()) for rank in range(options.workers)
        ]
    slowest = max(rank["ended"] - rank["began"] for rank in ranks)
    whole = outcome["returned"] - min(rank["began"] for rank in ranks)
    into[0].append(count / slowest)
    into[1].append(count / whole)
    if side == "everstep" and outcome["history"] != list(range(count + 1)):
        raise BenchError(
            f"Result.metrics_history has {len(outcome['history'])} of {count + 1} reports, or not in order"
        )
