"""The production driver under virtual time: schedules of faults hold, and known mistakes are found."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.control.commands import Outcome, Rung
from everstep.sim import coverage
from everstep.sim.engine import SimChannel
from everstep.sim.hunt import hunt, try_seeds
from everstep.sim.mistakes import MISTAKES
from everstep.sim.planting import planted
from everstep.sim.scenario import FaultKind, draw
from everstep.sim.shrink import find, shrink
from everstep.sim.time import RuleBroken, VirtualTime

DOCS = Path(__file__).parents[2] / "docs"
FIRST, FIXED, MOST = 5_000, 500, 5_000
"""Schedules of the fixed set; more are added only while a transition or a recovery step is missing."""
SOAK = 1_000_000
SEEDS = (
    715,  # a part that failed, and of which a later driver did not hear
    3_000_046,  # an upload that ended after a later one of its replica group had been let go
    700_540,  # the same, and the later one had rotted
    910_000_055,  # the same, and the journal did not know of the later one any more
    950_000_542,  # the same, and the later one's manifest got no answer
    950_001_116,  # a driver that slept until a preemption's notice had lapsed
    141_553_971,  # the same, and the slice was lost meanwhile
    12_061,  # a template that died while nobody drove
    141_553_250,  # a driver that was replaced, and retired hosts of which others knew better
    950_001_799,  # a start that waited for the journal, until its host was lost and back
    960_002_128,  # a host that was frozen during a take-over
    960_003_828,  # a checkpoint that rotted while a driver took the run
    970_001_553,  # a driver that is told twice that it has lost the run
    17_877_478,  # workers that could not be killed when their host was let go, and others beside them
    551_408_814,  # the same, in a slice of several hosts
    551_409_352,  # a user who stopped a finished run at once, during its last commit
    459_295_805,  # an attempt that nobody could know of any more, and the next of the same number
    151_316_402,  # a commit, and its removal, that the journal lost before all ranks were acknowledged
    980_000_374,  # a host of a slice of replica groups that was frozen during a take-over
    354_018_862,  # a driver that was replaced while only validations were left
    354_020_315,  # a hang that only its time proved, as the others had returned
    278_849_610,  # a group without a place, after its replacements had failed and everything restarted
    551_415_299,  # a snapshot that was being taken while a driver took the run over
    31_000_868,  # a driver that was replaced while it put storage in order
    230_744_062,  # manifests of a driver that was replaced, in another order than the next recorded them
    43_970_229,  # a journal that lost all that it said, and attempts that were counted anew
    730_098_979,  # a journal that lost its last checkpoint while lists lacked it
    300_003_682,  # a snapshot that workers of an earlier driver wrote over before they ended
)
CORES = os.cpu_count() or 1


@pytest.mark.timeout(0)
def test_a_fixed_set_of_schedules_holds_and_takes_every_transition_and_every_recovery_step() -> None:
    tally = hunt(FIRST, FIXED, jobs=CORES)
    assert tally.schedules == FIXED
    while (tally.never_taken or set(tally.rungs) != set(Rung)) and tally.schedules < MOST:
        tally.add(hunt(FIRST + tally.schedules, FIXED, jobs=CORES))
    assert not tally.found
    assert tally.never_taken == []
    assert set(tally.rungs) == set(Rung)
    assert set(tally.outcomes) == {Outcome.FINISHED, Outcome.FAILED, Outcome.STOPPED}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_schedule_that_failed_once_holds(seed: int) -> None:
    assert not try_seeds(seed, 1).found


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_fresh_schedules_hold(capsys: pytest.CaptureFixture[str]) -> None:
    first = random.SystemRandom().randrange(10**6, 10**9)
    with capsys.disabled():
        print(f"\n{SOAK:,} fresh schedules from seed {first}", flush=True)
    tally = hunt(first, SOAK, jobs=CORES)
    assert tally.schedules == SOAK
    assert not tally.found, f"everstep sim-check --story --schedules 1 --seed …: {tally.found}"


# ---------------------------------------------------------------------- known mistakes


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str) -> None:
    assert try_seeds(1, 10_000, name, stop=True).found


def test_a_mistake_leaves_the_code_as_it_was() -> None:
    [seed] = try_seeds(1, 50, "unjournaled-deletion", stop=True).found
    assert not try_seeds(seed, 1).found


def test_what_is_found_is_shrunk_to_something_shorter_that_still_fails() -> None:
    with planted(MISTAKES["double-release"]):
        found = next(found for seed in range(1, 2000) if (found := find(draw(seed))) is not None)
        short = shrink(found)
        again = find(short.scenario)
    assert again is not None
    assert again.what == short.what
    assert "given back twice" in short.what
    assert len(short.scenario.strikes) <= len(found.scenario.strikes)
    assert len(short.story.lines) <= len(found.story.lines)
    assert "Release(" in short.story.text()


# ---------------------------------------------------------------------- which fault leads where


@pytest.mark.parametrize("fault", FaultKind, ids=lambda fault: fault.name.lower())
def test_each_fault_leads_to_the_recovery_steps_that_the_table_has_and_to_no_other(fault: FaultKind) -> None:
    row = coverage.REACHES[fault]
    assert row.why_not_the_others
    found = coverage.reached(fault)
    assert row.often <= found
    assert found <= row.often | row.seldom


def test_the_page_about_it_is_up_to_date() -> None:
    assert (DOCS / "fault-coverage.md").read_text() == coverage.page()


# ---------------------------------------------------------------------- the same again

DIGEST = """
import hashlib
from everstep.sim.scenario import draw
from everstep.sim.schedule import Schedule
digest = hashlib.sha256()
for seed in range(40, 60):
    schedule = Schedule(draw(seed))
    schedule.run()
    digest.update(schedule.journal() + schedule.story.text().encode())
print(digest.hexdigest())
"""


def test_the_same_seed_gives_the_same_story_and_journal_byte_for_byte_in_every_process() -> None:
    digests = set()
    for hash_seed in ("0", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            [sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=True
        )
        digests.add(ran.stdout)
    assert len(digests) == 1


# ---------------------------------------------------------------------- time


def test_things_happen_in_the_order_of_their_time_and_then_of_their_making() -> None:
    time = VirtualTime()
    happened: list[str] = []
    for when, what in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (11.0, "too late")):
        time.at(when, lambda what=what: happened.append(what))  # type: ignore[misc]
    time.run(10.0)
    assert happened == ["a", "b", "c"]


def test_what_goes_round_in_circles_is_noticed() -> None:
    time = VirtualTime()

    def again() -> None:
        time.after(0.0, again)

    again()
    with pytest.raises(RuleBroken, match="no end"):
        time.run(10.0, most=1000)


def test_a_channel_is_late_but_keeps_its_order() -> None:
    time = VirtualTime()
    channel = SimChannel(time, random.Random(1))
    heard: list[int] = []
    for number in range(100):
        channel.send(lambda number=number: heard.append(number))  # type: ignore[misc]
    assert not heard
    time.run(10.0)
    assert heard == list(range(100))
