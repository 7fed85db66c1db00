"""A disk that is full, broken or slow for a while, in every phase of a run: it finishes, or says what is
wrong and can be resumed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.journal import journal
from everstep.journal.history import read_history
from processes import LIMIT_S, wait_for

from .running import Attacked, everything_is_whole, worker_of

SHIM = Path(__file__).parent / "faulty_disk"
SLOW = "slow 1000000"
SAYS = {"full": "no space left", "broken": "Input/output error"}


class Disk:
    """What is wrong with the disk of a run (see ``faulty_disk``)."""

    def __init__(self, folder: Path) -> None:
        self._told = folder / "disk"

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(SHIM), os.environ["PYTHONPATH"]])
        return {"PYTHONPATH": path, "EVERSTEP_TEST_DISK": str(self._told)}

    def is_now(self, what: str) -> None:
        draft = self._told.with_name("disk-draft")
        draft.write_text(what)
        draft.rename(self._told)

    def is_well_after(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, lambda: self.is_now(""))
        timer.start()
        return timer


def nothing_yet(attacked: Attacked, driver: subprocess.Popen[str]) -> None:
    pass


def training(attacked: Attacked, driver: subprocess.Popen[str]) -> None:
    wait_for(lambda: attacked.has_more_than(3), "checkpoints")


def compacting(attacked: Attacked, driver: subprocess.Popen[str]) -> None:
    log = attacked.run.child(journal.FOLDER)
    wait_for(lambda: any(f.path.startswith("archive-") for f in log.list()), "an archive", look_s=0.001)


def nearly_done(attacked: Attacked, driver: subprocess.Popen[str]) -> None:
    wait_for(lambda: attacked.has_more_than(35), "nearly the end")


PHASES: dict[str, Callable[[Attacked, subprocess.Popen[str]], None]] = {
    "start": nothing_yet,
    "commit": training,
    "compaction": compacting,
    "restart": training,
    "finish": nearly_done,
}


def attack(tmp_path: Path, disk: Disk, **settings: Any) -> Attacked:
    return Attacked(tmp_path, environment=disk.environment(), steps=40, **settings)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("phase", "what", "seconds"),
    [
        ("start", "full", 2.0),
        ("compaction", "broken", 2.0),
        ("finish", "full", 2.0),
        *(
            pytest.param(phase, what, seconds, marks=pytest.mark.soak)
            for phase in PHASES
            for what in ("full", "broken")
            for seconds in (2.0, 60.0)
        ),
    ],
)
def test_a_disk_that_was_full_or_broken_for_a_while_costs_nothing_that_was_committed(
    tmp_path: Path, phase: str, what: str, seconds: float
) -> None:
    disk = Disk(tmp_path)
    attacked = attack(tmp_path, disk)
    if phase == "start":
        disk.is_now(what)
    driver = attacked.start()
    PHASES[phase](attacked, driver)
    disk.is_now(what)
    before = attacked.newest()
    if phase == "restart":
        os.kill(worker_of(driver), signal.SIGKILL)
    timer = disk.is_well_after(seconds)
    code = driver.wait(seconds + 180)
    timer.join()
    assert attacked.newest() >= before
    if code != 0 or attacked.newest() < 40:
        assert SAYS[what] in attacked.log()
        assert attacked.start().wait(LIMIT_S) == 0, attacked.log()[-2000:]
    assert read_history(attacked.run).outcome == "finished", attacked.log()[-2000:]
    assert attacked.newest() == 40
    everything_is_whole(attacked.run)


@pytest.mark.parametrize(("who", "steps"), [("", 40), (" attacked.py", 15)], ids=["everybody", "driver"])
def test_a_run_whose_disk_stays_full_says_at_the_end_what_is_not_saved(
    tmp_path: Path, who: str, steps: int
) -> None:
    disk = Disk(tmp_path)
    attacked = Attacked(
        tmp_path, environment=disk.environment(), steps=steps, deadlines={"final_upload_s": 1.0}
    )
    driver = attacked.start()
    training(attacked, driver)
    disk.is_now(f"full{who}")
    newest = attacked.newest()
    assert driver.wait(LIMIT_S) == 0, attacked.log()[-2000:]
    assert attacked.newest() == newest
    [line] = [line for line in attacked.log().splitlines() if "reported checkpoints were not saved" in line]
    assert f"{steps - newest} reported checkpoints" in line
    assert SAYS["full"] in line
    assert f"The newest that is saved is checkpoint_0001_{newest:06d}, of report {newest}" in line
    assert f"unsaved {' '.join(map(str, range(newest + 1, steps + 1)))}" in attacked.log()


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "phase", ["commit", *(pytest.param(p, marks=pytest.mark.soak) for p in PHASES if p != "commit")]
)
def test_a_run_on_a_slow_disk_finishes(tmp_path: Path, phase: str) -> None:
    disk = Disk(tmp_path)
    attacked = attack(tmp_path, disk, payload=200_000)
    if phase == "start":
        disk.is_now(SLOW)
    driver = attacked.start()
    PHASES[phase](attacked, driver)
    disk.is_now(SLOW)
    if phase == "restart":
        os.kill(worker_of(driver), signal.SIGKILL)
    assert driver.wait(LIMIT_S) == 0, attacked.log()[-2000:]
    assert read_history(attacked.run).outcome == "finished"
    assert attacked.newest() == 40
    everything_is_whole(attacked.run)


def test_sigterm_ends_a_driver_whose_last_checkpoint_finds_no_room_for_its_manifest(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    attacked = attack(tmp_path, disk, deadlines={"final_upload_s": 10 * LIMIT_S})
    driver = attacked.start()
    training(attacked, driver)
    disk.is_now("full attacked.py")
    wait_for(lambda: "can't be committed yet" in attacked.log(), "a commit that is tried again")
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(LIMIT_S) in (143, 1), attacked.log()[-2000:]
    disk.is_now("")
    newest = attacked.newest()
    assert attacked.start().wait(LIMIT_S) == 0, attacked.log()[-2000:]
    assert min(step for _, step in attacked.restored()[-2:]) >= newest


@pytest.mark.timeout(0)
@pytest.mark.parametrize("what", ["full", "slow 10000", pytest.param("broken", marks=pytest.mark.soak)])
def test_sigterm_ends_a_driver_whatever_the_disk_does(tmp_path: Path, what: str) -> None:
    disk = Disk(tmp_path)
    attacked = attack(tmp_path, disk)
    driver = attacked.start()
    training(attacked, driver)
    disk.is_now(what)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(LIMIT_S) in (143, 1), attacked.log()[-2000:]
    disk.is_now("")
    newest = attacked.newest()
    assert attacked.start().wait(LIMIT_S) == 0, attacked.log()[-2000:]
    assert min(step for _, step in attacked.restored()[-2:]) >= newest
    assert attacked.newest() == 40
