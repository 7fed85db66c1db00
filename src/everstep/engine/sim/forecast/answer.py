"""What a forecast comes to, and what to do about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import msgspec

from everstep.engine.sim.forecast.forecast import Forecast
from everstep.engine.sim.forecast.ledger import Category
from everstep.engine.sim.forecast.question import Policy, Question


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    goodput: float
    """The share of all host-seconds in which steps were made that count."""
    shares: dict[str, float]
    host_hours: dict[str, float]
    restarts: dict[str, int]
    """By rung of the ladder."""
    worker_failures: int
    host_failures: int
    steps_lost: float
    """Steps of the whole group that had to be done again."""
    recovery_s: float | None
    """Median, from a fault to the first new step."""
    events: int
    pieces: list[dict[str, float]]
    """The shares over time."""


def ask(question: Question, policy: Policy, progress: Callable[[float], None] = lambda done: None) -> Answer:
    forecast = Forecast(question, policy, progress)
    forecast.run()
    ledger = forecast.ledger
    width = ledger.hosts * ledger.seconds / ledger.PIECES
    return Answer(
        policy=policy.name,
        goodput=ledger.share(Category.STEP),
        shares={category.value: ledger.share(category) for category in Category},
        host_hours={category.value: ledger.total[category] / 3600.0 for category in Category},
        restarts={rung.value: count for rung, count in forecast.rungs.items()},
        worker_failures=forecast.causes["worker"],
        host_failures=forecast.causes["host"],
        steps_lost=forecast.lost_s / question.step_s,
        recovery_s=statistics.median(forecast.recoveries) if forecast.recoveries else None,
        events=forecast.events,
        pieces=[
            {category.value: piece[category] / width for category in Category} for piece in ledger.pieces
        ],
    )


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    change: str
    """The option that says it."""
    goodput: float
    """What that would give, simulated."""
    gain: float


def advise(
    question: Question, policy: Policy, answer: Answer, progress: Callable[[], None] = lambda: None
) -> list[Advice]:
    """Ask the same question with one thing changed, and tell what helps, the best first."""
    found = []
    for what, change, changed in _neighbours(question, answer):
        goodput = ask(changed, policy).goodput
        progress()
        if goodput > answer.goodput + 0.0005:
            advice = Advice(what=what, change=change, goodput=goodput, gain=goodput - answer.goodput)
            found.append(advice)
    return sorted(found, key=lambda advice: -advice.gain)


def best_interval_s(question: Question, answer: Answer) -> float | None:
    """Young's rule: the square root of twice the cost of a checkpoint times the time between interruptions."""
    interruptions = sum(n for rung, n in answer.restarts.items() if rung != "first start")
    if not interruptions or question.checkpoint_cost_s <= 0:
        return None
    between_s = question.seconds / interruptions
    return max(question.step_s, math.sqrt(2.0 * question.checkpoint_cost_s * between_s))


def _neighbours(question: Question, answer: Answer) -> list[tuple[str, str, Question]]:
    change = msgspec.structs.replace
    found: list[tuple[str, str, Question]] = []
    interval = best_interval_s(question, answer)
    if interval is not None:
        rounded = float(f"{interval:.2g}")
        for every in (rounded, rounded / 2):
            changed = change(question, checkpoint_every_s=every)
            found.append((f"a checkpoint every {every:g} s", f"--checkpoint-every-s {every:g}", changed))
    if question.trace is None:
        fewer = sorted(
            {
                n
                for n in (question.spares // 2, 2 * question.spares, question.spares + 4)
                if n > question.spares
            }
        )
        for spares in fewer:
            found.append((f"{spares} spare slices", f"--spares {spares}", change(question, spares=spares)))
    if question.elastic:
        found.append(
            ("a fixed size", f"--min-slices {question.slices}", change(question, min_slices=question.slices))
        )
    else:
        least = max(1, question.slices * 3 // 4)
        changed = change(question, min_slices=least)
        found.append((f"training on with {least} slices or more", f"--min-slices {least}", changed))
    return found
