"""Schedules of faults in virtual time, with what must always hold checked after every event.

``EVERSTEP_SIM_SEED=1234`` replays one; ``EVERSTEP_SIM_SECONDS`` says how long fresh ones are tried.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from everstep.control.commands import Outcome, Rung
from everstep.control.table import TRANSITIONS, Phase
from everstep.engine.sim.clock import Channel, Clock
from everstep.engine.sim.invariants import Violation
from everstep.engine.sim.run import Finding, simulate

FIXED = range(1500)


def test_a_fixed_set_of_schedules_holds_and_takes_every_transition_and_every_rung() -> None:
    transitions: Counter[tuple[Phase, Phase]] = Counter()
    rungs: Counter[Rung] = Counter()
    outcomes: Counter[Outcome] = Counter()
    for seed in FIXED:
        result = simulate(seed)
        transitions += result.transitions
        rungs += result.rungs
        outcomes[result.outcome] += 1
    never = {f"{a} → {b}" for a, b in TRANSITIONS if not transitions[(a, b)]}
    assert never == set()
    assert set(rungs) == set(Rung) - {Rung.WAIT, Rung.FAIL}
    assert set(outcomes) == {Outcome.FINISHED, Outcome.FAILED, Outcome.STOPPED}


@pytest.mark.soak
def test_fresh_schedules_hold(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = os.environ.get("EVERSTEP_SIM_SEED")
    if chosen is not None:
        print(simulate(int(chosen)).story.text())
        return
    first = random.SystemRandom().randrange(10**6, 10**9)
    until = time.monotonic() + float(os.environ.get("EVERSTEP_SIM_SECONDS", "12"))
    began, seed = time.monotonic(), first
    while time.monotonic() < until:
        simulate(seed)
        seed += 1
    speed = (seed - first) / (time.monotonic() - began)
    with capsys.disabled():
        print(f"\n{seed - first} fresh schedules from seed {first}: {speed:.0f} a second")


@pytest.mark.parametrize("seed", [3, 77, 1044])
def test_the_same_seed_tells_the_same_story_byte_for_byte(seed: int) -> None:
    assert simulate(seed).story.text() == simulate(seed).story.text()


def test_a_finding_names_its_seed_its_story_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.engine.sim import invariants

    def broken(self: object) -> None:
        raise Violation("something does not hold")

    monkeypatch.setattr(invariants.Invariants, "at_rest", broken)
    with pytest.raises(Finding, match="seed 5: Violation: something does not hold") as found:
        simulate(5)
    assert "EndRun" in str(found.value)
    assert "python -m everstep.engine.sim.run --seed 5 --story" in str(found.value)


def test_things_happen_in_the_order_of_their_time_and_then_of_their_making() -> None:
    clock = Clock()
    happened: list[str] = []
    for when, what in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(when, lambda what=what: happened.append(what))  # type: ignore[misc]
    while clock.step(10.0):
        pass
    assert happened == ["a", "b", "c"]
    assert clock.now == 10.0


def test_a_channel_is_late_but_keeps_its_order() -> None:
    clock = Clock()
    channel = Channel(clock)
    heard: list[int] = []
    for number, latency in enumerate((5.0, 0.1, 1.0)):
        channel.send(latency, lambda number=number: heard.append(number))  # type: ignore[misc]
    while clock.step(10.0):
        pass
    assert heard == [0, 1, 2]
