"""From a schedule that fails to a shorter one that still does, for a person to read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from everstep.sim.scenario import Scenario
from everstep.sim.schedule import Schedule
from everstep.sim.story import Story, brief
from everstep.sim.time import RuleBroken

_CHANCES = (
    "slow_reservation",
    "refused_reservation",
    "partial_reservation",
    "failed_preparation",
    "hung_preparation",
    "failed_spawn",
    "failed_rendezvous",
    "failed_upload",
    "lost_answers",
    "duplicates",
    "asynchronous",
    "partless",
    "clock_apart",
    "new_code",
)
MOST_TRIES = 500


class FailedSchedule(msgspec.Struct, frozen=True):
    """A schedule in which something does not hold, with what led there."""

    scenario: Scenario
    what: str
    story: Story

    def __str__(self) -> str:
        return brief(self.scenario)


def failure_of(schedule: Schedule) -> str:
    """What did not hold; empty if everything did."""
    try:
        schedule.run()
    except RuleBroken as broken:
        return str(broken)
    except Exception as error:  # a driver that is wrong may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def find(scenario: Scenario) -> FailedSchedule | None:
    schedule = Schedule(scenario)
    what = failure_of(schedule)
    return FailedSchedule(scenario, what, schedule.story) if what else None


def shrink(finding: FailedSchedule) -> FailedSchedule:
    """Leave out one thing after the other for as long as the same kind of thing goes wrong, and there is not
    more to read of it for that.
    """
    best = finding
    tries = 0
    improved = True
    while improved:
        improved = False
        for smaller in _smaller(best.scenario):
            tries += 1
            if tries > MOST_TRIES:
                return best
            found = find(smaller)
            if found is None or len(found.story.lines) > len(best.story.lines):
                continue
            if kind(found.what) == kind(best.what):
                best, improved = found, True
                break
    return best


def kind(what: str) -> str:
    """What went wrong, without the names and numbers of this case."""
    return "".join("#" if letter.isdigit() else letter for letter in what.split(":")[0] + what[:24])


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    strikes = scenario.strikes
    if len(strikes) > 3:
        half = len(strikes) // 2
        yield msgspec.structs.replace(scenario, strikes=strikes[:half])
        yield msgspec.structs.replace(scenario, strikes=strikes[half:])
    for i in range(len(strikes)):
        yield msgspec.structs.replace(scenario, strikes=strikes[:i] + strikes[i + 1 :])
    for name in _CHANCES:
        if getattr(scenario, name):
            yield msgspec.structs.replace(scenario, **{name: 0.0})
    if scenario.stop_in is not None:
        yield msgspec.structs.replace(scenario, stop_in=None)
    if scenario.keep is not None:
        yield msgspec.structs.replace(scenario, keep=None, scored=False)
    if scenario.validates:
        yield msgspec.structs.replace(scenario, validates=False)
    if scenario.steps > 3:
        yield msgspec.structs.replace(scenario, steps=3)
    needed = math.ceil(scenario.settings.workers_min / (scenario.hosts_per_slice * scenario.slots))
    for fewer in range(max(1, needed), scenario.slices):  # with less than that, it waits for good
        yield msgspec.structs.replace(scenario, slices=fewer)
