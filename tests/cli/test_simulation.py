"""``everstep sim-check`` and ``everstep simulate``, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from everstep.cli.main import main
from everstep.sim.mistakes import MISTAKES
from everstep.sim.rules import Rules
from everstep.sim.time import RuleBroken
from processes import ours, wait_for


def everstep(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


# ---------------------------------------------------------------------- sim-check


def test_schedules_that_hold_are_counted_with_their_speed_and_their_seed() -> None:
    ran = everstep("sim-check", "--schedules", "20", "--seed", "7", "--jobs", "1")
    assert ran.exit_code == 0
    assert "20 schedules from seed 7 in" in ran.output
    assert "a second: 0 violations" in ran.output


def test_a_seed_is_drawn_and_printed_when_none_is_given() -> None:
    ran = everstep("sim-check", "--schedules", "2", "--jobs", "1", "--json")
    assert ran.exit_code == 0
    assert json.loads(ran.output)["seed"] >= 0


def test_a_violation_prints_its_seed_a_short_story_and_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: object) -> None:
        raise RuleBroken("something does not hold")

    monkeypatch.setattr(Rules, "check_end", broken)
    ran = everstep("sim-check", "--schedules", "3", "--seed", "5", "--jobs", "1")
    assert ran.exit_code == 1
    assert "seed 5: something does not hold" in ran.output
    assert "to 0: Scenario(" in ran.output  # no fault is needed for this one
    assert "EndRun" in ran.output
    assert "replay: everstep sim-check --seed 5 --schedules 1 --story" in ran.output
    assert "3 violations" in ran.output


def test_several_processes_find_what_one_finds() -> None:
    def counts(jobs: str) -> object:
        ran = everstep("sim-check", "--schedules", "60", "--seed", "11", "--jobs", jobs, "--json")
        told = json.loads(ran.output)
        return told["outcomes"], told["rungs"], told["violations"]

    assert counts("1") == counts("2")


def test_processes_of_a_hunt_that_is_killed_end_with_it() -> None:
    def workers() -> list[str]:
        return [command for command in ours().values() if "multiprocessing.spawn" in command]

    command = (sys.executable, "-m", "everstep.cli.main", "sim-check", "--schedules", "1000000")
    hunt = subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(workers()) == 2, "both processes")
    finally:
        hunt.kill()
        hunt.wait()
    wait_for(lambda: not workers(), "their end")


def test_known_mistakes_are_listed_and_found() -> None:
    listed = everstep("sim-check", "--plant", "list")
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == list(MISTAKES)
    ran = everstep("sim-check", "--plant", "lost-append", "--seed", "1", "--schedules", "50")
    assert ran.exit_code == 1
    assert "planted lost-append: found after" in ran.output
    assert "--plant lost-append" in ran.output


def test_an_unknown_mistake_is_refused_with_the_names_of_the_known_ones() -> None:
    ran = everstep("sim-check", "--plant", "nonesuch")
    assert ran.exit_code == 2
    assert "live-hosts" in ran.output


def test_the_story_of_one_schedule_is_told_in_full() -> None:
    ran = everstep("sim-check", "--seed", "77", "--schedules", "1", "--story")
    assert ran.exit_code == 0
    assert "driver-1 starts" in ran.output
    assert "RunOpened" in ran.output
    assert "seed 77 holds" in ran.output


# ---------------------------------------------------------------------- simulate


def test_a_forecast_tells_goodput_by_category_for_each_policy_and_what_would_help() -> None:
    ran = everstep(
        "simulate", "--slices", "4", "--days", "20", "--mtbf", "200", "--checkpoint-every-s", "9000"
    )
    assert ran.exit_code == 0, ran.output
    for word in ("everstep", "full-restart", "waiting for capacity", "goodput", "steps lost", "--spares"):
        assert word in ran.output


def test_a_forecast_as_json_adds_up() -> None:
    ran = everstep("simulate", "--preset", "bamboo-p3", "--policy", "everstep", "--no-advice", "--json")
    told = json.loads(ran.output)
    [answer] = told["answers"]
    assert sum(answer["shares"].values()) == pytest.approx(1.0)
    assert told["question"]["slices"] == 32


def test_presets_are_listed_with_their_sources() -> None:
    ran = everstep("simulate", "--preset", "list")
    assert "arXiv:2407.21783" in ran.output
    assert "419" in ran.output
    assert "MIT licence" in ran.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--slices"),
        (("--preset", "nonesuch"), "bamboo-p3"),
        (("--slices", "4", "--policy", "hope"), "full-restart"),
        (("--slices", "4", "--min-slices", "5"), "--min-slices 5 is above --slices 4"),
        (("--slices", "4", "--trace", "/nowhere.csv"), "/nowhere.csv"),
        (("--preset", "bamboo-p3", "--hosts-per-slice", "2"), "--hosts-per-slice 1"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_what_to_do(
    arguments: tuple[str, ...], told: str
) -> None:
    ran = everstep("simulate", *arguments)
    assert ran.exit_code != 0
    assert told in ran.output
    assert "Traceback" not in ran.output


def test_a_trace_is_simulated_for_as_long_as_it_tells_of(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("0,add,a\n0,add,b\n36000000,remove,b\n")
    ran = everstep("simulate", "--slices", "2", "--trace", str(file), "--no-advice", "--json")
    assert json.loads(ran.output)["question"]["days"] == pytest.approx(10 / 24)


def test_times_of_a_recovery_can_be_given() -> None:
    def redo_and_restart(*more: str) -> float:
        cluster = ("--slices", "4", "--spares", "4", "--days", "20", "--mtbf", "200")
        ran = everstep("simulate", *cluster, "--policy", "everstep", "--no-advice", "--json", *more)
        return float(json.loads(ran.output)["answers"][0]["shares"]["restart"])

    assert redo_and_restart("--start-s", "300") > 10 * redo_and_restart()
