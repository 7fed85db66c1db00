"""The production driver under virtual time: fresh schedules hold, and known mistakes are found."""

from __future__ import annotations

import os
import random

import pytest
from click.testing import CliRunner

from everstep.cli.main import main
from everstep.sim.hunt import hunt, tell, try_seeds
from everstep.sim.mistakes import MISTAKES

FRESH = 2000
SOAK = 1_000_000
CORES = os.cpu_count() or 1


@pytest.mark.timeout(0)
@pytest.mark.parametrize("count", [FRESH, pytest.param(SOAK, marks=pytest.mark.soak)])
def test_fresh_schedules_of_the_driver_hold(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    first = random.SystemRandom().randrange(10**6, 10**9)
    tally = hunt(first, count, jobs=CORES)
    with capsys.disabled():
        print(f"\n{tally.schedules:,} schedules of the driver from seed {first}")
    assert tally.schedules == count
    assert not tally.found, f"everstep sim-check --driver --story --schedules 1 --seed …: {tally.found}"


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_was_made_once_is_found(name: str) -> None:
    assert try_seeds(1, 2000, name, stop=True).found


def test_the_same_seed_is_the_same_schedule() -> None:
    first, again = tell(7), tell(7)
    assert first[0] == again[0]
    assert "driver-1 starts" in first[0]


def test_a_mistake_leaves_the_driver_as_it_was() -> None:
    assert try_seeds(1, 50, "unjournaled-deletion", stop=True).found
    assert not try_seeds(1, 50).found


def test_the_command_tells_what_it_found_and_how_to_replay_it() -> None:
    ran = CliRunner().invoke(
        main, ["sim-check", "--driver", "--seed", "1", "--schedules", "50", "--plant", "lost-append"]
    )
    assert ran.exit_code == 1
    assert "replay: everstep sim-check --driver --seed" in ran.output
    held = CliRunner().invoke(
        main, ["sim-check", "--driver", "--seed", "1", "--schedules", "20", "--jobs", "1"]
    )
    assert held.exit_code == 0
    assert "20 schedules of the driver from seed 1" in held.output
    assert "0 violations" in held.output
