"""One schedule from its seed, or many; and the command line that replays one.

python -m everstep.engine.sim.run --schedules 1000
python -m everstep.engine.sim.run --seed 1234 --story
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from everstep.control.commands import Outcome, Rung
from everstep.control.table import TRANSITIONS, Phase
from everstep.engine.sim.clock import Clock
from everstep.engine.sim.drivers import Drivers
from everstep.engine.sim.faults import Faults
from everstep.engine.sim.invariants import Invariants, Violation
from everstep.engine.sim.scenario import Scenario, draw
from everstep.engine.sim.story import Story, brief
from everstep.engine.sim.world import World

MOST_EVENTS = 40_000
"""No schedule takes as many; one that does goes round in circles."""


class Finding(Exception):
    """A schedule in which something does not hold, with what led there."""

    def __init__(self, scenario: Scenario, story: Story, cause: BaseException) -> None:
        self.seed = scenario.seed
        self.story = story
        super().__init__(
            f"seed {scenario.seed}: {type(cause).__name__}: {cause}\n{brief(scenario)}\n{story.text(last=80)}"
            f"replay: python -m everstep.engine.sim.run --seed {scenario.seed} --story"
        )


class Result:
    """What a schedule came to."""

    def __init__(self, story: Story, invariants: Invariants, outcome: Outcome, events: int) -> None:
        self.story = story
        self.transitions = invariants.transitions
        self.rungs = invariants.rungs
        self.outcome = outcome
        self.events = events


def simulate(seed: int) -> Result:
    """Run the schedule of this seed to its end. Raises ``Finding``."""
    scenario = draw(seed)
    story = Story()
    try:
        return _simulate(scenario, story)
    except (
        Violation,
        AssertionError,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        StopIteration,
    ) as cause:
        raise Finding(scenario, story, cause) from cause


def _simulate(scenario: Scenario, story: Story) -> Result:
    rng = random.Random(f"world {scenario.seed}")
    clock = Clock()
    world = World(clock, rng, scenario)
    invariants = Invariants(scenario, world)
    drivers = Drivers(clock, world, story, invariants.after)
    invariants.drivers = drivers
    faults = Faults(clock, rng, scenario, world, drivers, story)
    faults.schedule()
    drivers.open()
    events = 0

    def run(until: float, stop_when_ended: bool = True) -> None:
        nonlocal events
        while clock.step(until) and not (stop_when_ended and drivers.ended):
            events += 1
            if events > MOST_EVENTS:
                raise Violation(f"{MOST_EVENTS} events, and no end")

    run(scenario.fault_s)
    # 7: with enough capacity and no more faults, it trains again within a bounded time, and comes to its end.
    limits = scenario.deadlines
    recovery = (
        limits.backoff_max_s * 3
        + 2 * (limits.reserve_s + limits.prepare_s + limits.start_s)
        + limits.notice_s
        + 200.0
    )
    run(scenario.fault_s + recovery)
    if not drivers.ended and drivers.brain.phase not in (Phase.RUNNING, Phase.ENDING):
        raise Violation(f"7: still {drivers.brain.phase} {recovery:.0f} s after the last fault")
    run(clock.now + recovery + limits.final_upload_s + 3 * scenario.steps * scenario.step_s)
    if drivers.outcome is None:
        raise Violation(f"7: no end, {drivers.brain.phase}")
    faults.calm()
    run(clock.now + 300.0, stop_when_ended=False)
    invariants.at_rest()
    return Result(story, invariants, drivers.outcome.outcome, events)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m everstep.engine.sim.run", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; with --story, the one to replay")
    parser.add_argument("--schedules", type=int, default=1)
    parser.add_argument("--story", action="store_true", help="print all that happened")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first finding")
    chosen = parser.parse_args(arguments)
    first = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(10**9)
    transitions: Counter[tuple[Phase, Phase]] = Counter()
    rungs: Counter[Rung] = Counter()
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    for seed in range(first, first + chosen.schedules):
        try:
            result = simulate(seed)
        except Finding as finding:
            if chosen.story:
                print(finding.story.text())
            outcomes[str(finding).split("\n", 1)[0].split(": ", 1)[1]] += 1
            if not chosen.keep_going:
                print(finding)
                return 1
            continue
        if chosen.story:
            print(result.story.text())
        transitions += result.transitions
        rungs += result.rungs
        outcomes[result.outcome.value] += 1
    seconds = time.monotonic() - began
    print(
        f"{chosen.schedules} schedules from seed {first} in {seconds:.1f} s, "
        f"{chosen.schedules / seconds:.0f} a second"
    )
    print(", ".join(f"{name}: {n}" for name, n in outcomes.most_common()))
    print(", ".join(f"{rung.value}: {n}" for rung, n in rungs.most_common()))
    never = [f"{a.value} → {b.value}" for a, b in TRANSITIONS if not transitions[(a, b)]]
    print("never taken:", ", ".join(never) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
