"""The result of a forecast, and which changes would improve it.

How a forecast is simulated is in ``forecast``, how a result is drawn in ``plot``.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable

import msgspec

from everstep.forecast.forecast import Forecast
from everstep.forecast.question import ForecastQuestion, Policy
from everstep.goodput import Category


class ForecastAnswer(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    goodput: float
    """The share of all host-seconds that went into steps that were not done again."""
    shares: dict[str, float]
    host_hours: dict[str, float]
    restarts: dict[str, int]
    """How many, by recovery step."""
    worker_failures: int
    host_failures: int
    steps_lost: float
    """Steps of the whole group that had to be done again."""
    recovery_s: float | None
    """Median, from an interruption until every replica group trains again."""
    events: int
    pieces: list[dict[str, float]]
    """The shares over time, in pieces of equal length."""


def ask(
    question: ForecastQuestion, policy: Policy, progress: Callable[[float], None] = lambda done: None
) -> ForecastAnswer:
    forecast = Forecast(question, policy, progress)
    # On a large cluster, garbage collection takes a quarter of the time and finds nothing.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        forecast.run()
    finally:
        if was_enabled:
            gc.enable()
    figures, ledger = forecast.figures, forecast.figures.ledger
    width = ledger.hosts * ledger.seconds / ledger.PIECES
    return ForecastAnswer(
        policy=policy.name,
        goodput=ledger.goodput,
        shares={category.value: ledger.share(category) for category in Category},
        host_hours={category.value: ledger.total[category] / 3600.0 for category in Category},
        restarts={rung.value: count for rung, count in figures.restarts.items()},
        worker_failures=figures.worker_failures,
        host_failures=figures.host_failures,
        steps_lost=figures.lost_s / question.step_s,
        recovery_s=statistics.median(figures.recoveries) if figures.recoveries else None,
        events=figures.events,
        pieces=[
            {category.value: piece[category] / width for category in Category} for piece in ledger.pieces
        ],
    )


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    change: str
    """The command-line option for it."""
    gain: float
    """In goodput, simulated with this change alone."""


MOST_HOSTS = 256
"""Advice for a larger cluster is simulated on one of this size, with as many failures, spares and repairs."""


def advise(
    question: ForecastQuestion,
    policy: Policy,
    answer: ForecastAnswer,
    progress: Callable[[], None] = lambda: None,
) -> list[Advice]:
    """Forecast the same question with one thing changed at a time. Returns the changes that help, the best
    first.
    """
    smaller = _smaller(question)
    before = answer.goodput if smaller is question else ask(smaller, policy).goodput
    found = []
    for what, change, changed in _neighbours(question, answer):
        gain = ask(_smaller(changed), policy).goodput - before
        progress()
        if gain > 0.0005:
            found.append(Advice(what=what, change=change, gain=gain))
    return sorted(found, key=lambda advice: -advice.gain)


def _smaller(question: ForecastQuestion) -> ForecastQuestion:
    slices = max(1, MOST_HOSTS // question.hosts_per_slice)
    if question.slices <= slices or question.mtbf_h is None:
        return question
    share = slices / question.slices
    return msgspec.structs.replace(
        question,
        slices=slices,
        min_slices=None if question.min_slices is None else max(1, round(question.min_slices * share)),
        mtbf_h=question.mtbf_h * (slices + question.spares) / (question.slices + question.spares),
    )


def best_interval_s(question: ForecastQuestion, answer: ForecastAnswer) -> float | None:
    """Young's rule: the square root of twice a checkpoint's cost times the time between interruptions."""
    interruptions = sum(n for rung, n in answer.restarts.items() if rung != "first start")
    if not interruptions or question.checkpoint_cost_s <= 0:
        return None
    between_s = question.seconds / interruptions
    return max(question.step_s, math.sqrt(2.0 * question.checkpoint_cost_s * between_s))


_SNAPSHOT_SHARE = 0.02
"""Of training. As much as Everstep lets snapshots take by default."""


def _neighbours(
    question: ForecastQuestion, answer: ForecastAnswer
) -> list[tuple[str, str, ForecastQuestion]]:
    change = msgspec.structs.replace
    found: list[tuple[str, str, ForecastQuestion]] = []
    interval = best_interval_s(question, answer)
    if interval is not None:
        every = float(f"{interval:.2g}")
        changed = change(question, checkpoint_every_s=every)
        what = f"a checkpoint every {every:g} s (Young's rule)"
        found.append((what, f"--checkpoint-every-s {every:g}", changed))
    if question.snapshot_every_s is None:
        every = float(f"{question.snapshot_cost_s / _SNAPSHOT_SHARE or question.step_s:.2g}")
        what = f"a snapshot in memory every {every:g} s"
        found.append((what, f"--snapshot-every-s {every:g}", change(question, snapshot_every_s=every)))
    elif not question.replicated:
        copies = question.snapshot_copies + 1
        what = f"{copies} copies of each snapshot"
        found.append((what, f"--snapshot-copies {copies}", change(question, snapshot_copies=copies)))
    if question.trace is None:
        for spares in sorted({question.spares + 1, question.spares + 4, 2 * question.spares} - {0}):
            if spares > question.spares:
                found.append(
                    (f"{spares} spare slices", f"--spares {spares}", change(question, spares=spares))
                )
    if question.elastic:
        changed = change(question, min_slices=question.slices)
        found.append(("a fixed size", f"--min-slices {question.slices}", changed))
    elif question.slices > 1:
        least = max(1, question.slices * 3 // 4)
        changed = change(question, min_slices=least)
        found.append((f"elastic: training on with {least} slices or more", f"--min-slices {least}", changed))
    return found
