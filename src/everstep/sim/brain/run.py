"""One schedule, from its seed or its scenario to its end."""

from __future__ import annotations

import random

import msgspec

from everstep.control.commands import Outcome, Record
from everstep.control.table import Phase
from everstep.sim.brain.clock import EventClock
from everstep.sim.brain.drivers import Drivers
from everstep.sim.brain.faults import Faults
from everstep.sim.brain.invariants import Invariants
from everstep.sim.brain.scenario import Scenario, draw
from everstep.sim.brain.story import Story
from everstep.sim.brain.violation import Violation
from everstep.sim.brain.world import World

_WRONG = (
    Violation,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    StopIteration,
    RecursionError,
)
"""What a brain that is wrong may raise, besides what the checks find."""


class ScheduleFailed(Exception):
    """A schedule in which something does not hold, with what led there."""

    def __init__(self, scenario: Scenario, story: Story, cause: BaseException) -> None:
        self.scenario = scenario
        self.story = story
        self.what = str(cause) if isinstance(cause, Violation) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"seed {scenario.seed}: {self.what}")


class ScheduleResult:
    """What a schedule came to."""

    def __init__(self, story: Story, invariants: Invariants, outcome: Outcome, events: int) -> None:
        self.story = story
        self.transitions = invariants.transitions
        self.rungs = invariants.rungs
        self.outcome = outcome
        self.events = events

    def journal(self) -> bytes:
        """Every record that the brain gave the journal, as bytes."""
        encoder = msgspec.msgpack.Encoder()
        return b"".join(
            encoder.encode(line.what) for line in self.story.lines if isinstance(line.what, Record)
        )


def run_seed(seed: int) -> ScheduleResult:
    """Run the schedule of this seed to its end. Raises ``ScheduleFailed``."""
    return run_scenario(draw(seed))


def run_scenario(scenario: Scenario) -> ScheduleResult:
    story = Story()
    try:
        return _run(scenario, story)
    except _WRONG as cause:
        raise ScheduleFailed(scenario, story, cause) from cause


def _run(scenario: Scenario, story: Story) -> ScheduleResult:
    clock = EventClock()
    world = World(clock, random.Random(f"world {scenario.seed}"), scenario)
    invariants = Invariants(scenario, world)
    drivers = Drivers(clock, world, story, invariants.after)
    invariants.drivers = drivers
    faults = Faults(clock, scenario, world, drivers, story)
    faults.schedule()
    drivers.open()
    events = clock.run(scenario.fault_s, drivers.has_ended)
    # 7: with enough capacity and no more faults, it trains again within a bounded time, and comes to its end.
    limits = scenario.deadlines
    recovery = (
        limits.backoff_max_s * 3
        + 2 * (limits.reserve_s + limits.prepare_s + limits.start_s)
        + limits.notice_s
        + 200.0
    )
    events += clock.run(scenario.fault_s + recovery, drivers.has_ended)
    if not drivers.has_ended():
        if drivers.brain.phase not in (Phase.RUNNING, Phase.ENDING):
            raise Violation(f"7: still {drivers.brain.phase} {recovery:.0f} s after the last fault")
        invariants.no_strangers()
    rest = recovery + limits.final_upload_s + 3 * scenario.steps * scenario.step_s
    events += clock.run(clock.now + rest, drivers.has_ended)
    if drivers.outcome is None:
        raise Violation(f"7: no end, {drivers.brain.phase}")
    faults.calm()
    events += clock.run(clock.now + 300.0)
    invariants.at_rest()
    return ScheduleResult(story, invariants, drivers.outcome.outcome, events)
