"""Attacks on what is stored: drivers that sleep too long, power cuts, storage that goes away."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from everstep.journal import journal
from everstep.journal.history import read_history
from everstep.process import kernel
from everstep.storage.asynchronous import ImmediateStore, complete
from processes import LIMIT_S, wait_for
from storage import blocking
from storage.faults import Fault, FaultyProxy
from storage.server import S3Server

from .attacked import STEP_S
from .running import Attacked, everything_is_whole, kill_everything, numbers, worker_of


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


# ---------------------------------------------------------------------- two drivers


@pytest.mark.timeout(0)
@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.soak)])
def test_a_driver_that_sleeps_through_a_take_over_and_a_compaction_is_fenced_and_deletes_nothing(
    tmp_path: Path, rng: random.Random, rounds: int
) -> None:
    attacked = Attacked(tmp_path, keep=3, ttl_s=1.0)
    driver = attacked.start()
    wait_for(lambda: attacked.has_more_than(3), "checkpoints")
    for n in range(rounds):
        later = attacked.newest() + rng.randrange(3)
        wait_for(partial(attacked.has_more_than, later), "checkpoints")
        time.sleep(rng.random() * 2 * STEP_S)  # the instant is what is hunted for
        driver.send_signal(signal.SIGSTOP)
        asleep_at = max(numbers(attacked.run))
        sleeper, driver = driver, attacked.start()
        wait_for(partial(attacked.is_compacted_beyond, asleep_at + 1), f"a compaction in round {n}")
        kept = everything_is_whole(attacked.run)
        sleeper.send_signal(signal.SIGCONT)
        assert sleeper.wait(LIMIT_S) == 1, "it is fenced"
        history = read_history(attacked.run)
        gone = kept - {*history.checkpoints} - history.deleted
        assert not gone, f"round {n}: {gone} are gone, and the journal doesn't say so"
        everything_is_whole(attacked.run)
    attacked.enough()
    assert driver.wait(LIMIT_S) == 0, attacked.log()


def test_a_driver_that_sleeps_through_its_own_start_leaves_its_successors_hosts_alone(tmp_path: Path) -> None:
    attacked = Attacked(tmp_path, ttl_s=1.0, max_failures=0, sleeps_before_its_host=True)
    sleeper = attacked.start()
    wait_for(lambda: kernel.state_of(sleeper.pid) == "T", "a driver that is stopped")
    attacked.settings["sleeps_before_its_host"] = False
    driver = attacked.start()
    wait_for(lambda: attacked.has_more_than(3), "checkpoints")
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait(LIMIT_S) == 1, "it is fenced"
    newest = attacked.newest()
    wait_for(lambda: attacked.has_more_than(newest), "more checkpoints")
    attacked.enough()
    assert driver.wait(LIMIT_S) == 0, attacked.log()
    assert len(attacked.restored()) == 2, "nothing was restarted"


# ---------------------------------------------------------------------- power cuts


@pytest.mark.timeout(0)
@pytest.mark.parametrize("savers", [[0], [0, 1]], ids=["rank 0 saves", "all ranks save"])
@pytest.mark.parametrize("place", ["folder", "s3"])
@pytest.mark.parametrize("cuts", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_after_a_power_cut_training_goes_on_from_the_newest_manifest(
    tmp_path: Path, rng: random.Random, s3: S3Server, place: str, savers: list[int], cuts: int
) -> None:
    remote = {"storage_path": f"s3://{s3.bucket()}/runs", "storage_options": s3.options()}
    attacked = Attacked(tmp_path, remote if place == "s3" else None, savers=savers)
    newest = 0
    for n in range(cuts + 1):
        driver = attacked.start()
        wait_for(partial(attacked.has_restored, 2 * (n + 1)), f"a start after cut {n}")
        found = {step for _, step in attacked.restored()[-2:]}
        assert len(found) == 1, "all ranks begin at one step"
        assert min(found) >= newest, f"cut {n}: step {newest} was committed, and {found} is restored"
        wait_for(partial(attacked.has_more_than, newest + rng.randrange(5)), "checkpoints")
        time.sleep(rng.random() * 2 * STEP_S)  # the instant is what is hunted for
        driver.kill()
        kill_everything()
        driver.wait()
        newest = attacked.newest()


# ---------------------------------------------------------------------- storage that goes away


@pytest.mark.timeout(0)
@pytest.mark.parametrize("fault", [Fault.STALL, Fault.LATE, Fault.RESET], ids=lambda fault: fault.name)
def test_sigterm_ends_a_driver_while_storage_is_away(tmp_path: Path, s3: S3Server, fault: Fault) -> None:
    with FaultyProxy(s3.port) as proxy:
        place = {"storage_path": f"s3://{s3.bucket()}/runs", "storage_options": s3.options(proxy.port)}
        attacked = Attacked(tmp_path, place)
        driver = attacked.start()
        wait_for(lambda: attacked.has_more_than(3), "checkpoints")
        proxy.always(fault)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(LIMIT_S) == 143, attacked.log()
        assert "could not be recorded" in attacked.log()
        proxy.always(None)
        newest = attacked.newest()
        attacked.enough()
        resumed = attacked.start()
        assert resumed.wait(LIMIT_S) == 0, attacked.log()
        assert min(step for _, step in attacked.restored()[-2:]) >= newest


@pytest.mark.timeout(0)
@pytest.mark.parametrize("away_s", [3.0, pytest.param(60.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("when", ["start", "training", "restart", "finish"])
def test_a_run_finishes_although_storage_was_away(
    tmp_path: Path, s3: S3Server, when: str, away_s: float
) -> None:
    with FaultyProxy(s3.port) as proxy:
        place = {"storage_path": f"s3://{s3.bucket()}/runs", "storage_options": s3.options(proxy.port)}
        # A start that gets no answer for longer than storage_s ends with that, and can be tried again.
        limits = {"closing_s": 2 * away_s + 10.0, "storage_s": max(60.0, 2 * away_s)}
        attacked = Attacked(tmp_path, place, steps=20, deadlines=limits)
        timer = Away(proxy, away_s)
        if when == "start":
            timer.begin()
        driver = attacked.start()
        if when == "training":
            wait_for(lambda: attacked.has_more_than(3), "checkpoints")
            timer.begin()
        elif when == "restart":
            wait_for(lambda: attacked.has_more_than(3), "checkpoints")
            timer.begin()
            os.kill(worker_of(driver), signal.SIGKILL)
        elif when == "finish":
            wait_for(lambda: attacked.has_more_than(15), "nearly the end")
            timer.begin()
        assert driver.wait(away_s + 180) == 0, attacked.log()
        timer.join()
        assert read_history(attacked.run).outcome == "finished"
        assert attacked.newest() == 20
        everything_is_whole(attacked.run)


class Away:
    """Storage answers nobody for a while."""

    def __init__(self, proxy: FaultyProxy, seconds: float) -> None:
        self._proxy = proxy
        self._timer = threading.Timer(seconds, lambda: proxy.always(None))

    def begin(self) -> None:
        self._proxy.always(Fault.STALL)
        self._timer.start()

    def join(self) -> None:
        self._timer.join()


# ---------------------------------------------------------------------- storage that is removed or damaged


def test_a_run_whose_folder_is_removed_saves_anew_and_can_be_resumed(tmp_path: Path) -> None:
    attacked = Attacked(tmp_path)
    driver = attacked.start()
    wait_for(lambda: attacked.has_more_than(10), "checkpoints")
    removed = Path(attacked.run.address()).rename(tmp_path / "removed")  # at one instant
    shutil.rmtree(removed)
    wait_for(lambda: "was removed or replaced" in attacked.log(), "a word about it")
    wait_for(lambda: attacked.has_more_than(10), "new checkpoints")
    driver.kill()
    kill_everything()
    driver.wait()
    newest = attacked.newest()
    attacked.enough()
    assert attacked.start().wait(LIMIT_S) == 0, attacked.log()
    assert min(step for _, step in attacked.restored()[-2:]) >= newest > 10


def test_a_run_whose_folder_was_away_for_a_while_loses_nothing_that_is_in_it(tmp_path: Path) -> None:
    """As with a disk that is unmounted under a run, and mounted again."""
    attacked = Attacked(tmp_path)
    here = Path(attacked.run.address())
    driver = attacked.start()
    wait_for(lambda: attacked.has_more_than(10), "checkpoints")
    away = here.rename(tmp_path / "away")
    wait_for(lambda: attacked.log().count("saves anew") == 1, "a word about it")
    wait_for(lambda: attacked.has_more_than(10), "new checkpoints")
    wait_for(lambda: any((here / journal.FOLDER).glob("archive-*")), "a new beginning")
    here.rename(tmp_path / "meanwhile")
    away.rename(here)
    whole = {f for f in blocking.list_folders(attacked.run) if blocking.read_manifest(attacked.run, f)}
    wait_for(lambda: attacked.log().count("saves anew") > 1, "a word about it again")
    newest = attacked.newest()
    wait_for(lambda: attacked.has_more_than(newest), "checkpoints where they were before")
    driver.kill()
    kill_everything()
    driver.wait()
    newest = attacked.newest()
    attacked.enough()
    assert attacked.start().wait(LIMIT_S) == 0, attacked.log()
    assert whole <= everything_is_whole(attacked.run)
    assert min(step for _, step in attacked.restored()[-2:]) >= newest


@pytest.mark.parametrize("how", ["flipped bit", "missing object"])
def test_a_damaged_journal_costs_no_checkpoint(tmp_path: Path, rng: random.Random, how: str) -> None:
    attacked = Attacked(tmp_path)
    driver = attacked.start()
    wait_for(lambda: attacked.has_more_than(30), "checkpoints")
    driver.kill()
    kill_everything()
    driver.wait()
    whole = [f for f in blocking.list_folders(attacked.run) if blocking.read_manifest(attacked.run, f)]
    folder = attacked.run.child(journal.FOLDER)
    scan = complete(journal.scan_journal(ImmediateStore(folder)))
    # What a compaction left behind when it was cut off doesn't count, and may be missing.
    counts = [*scan.archives, *map(journal.key_of, range(scan.first, scan.next))]
    victim = Path(folder.address(rng.choice(counts)))
    last = counts[-1]
    if how == "flipped bit":
        data = bytearray(victim.read_bytes())
        data[rng.randrange(len(data))] ^= 4
        victim.write_bytes(bytes(data))
    else:
        victim.unlink()
    newest = attacked.newest()
    attacked.enough()
    assert attacked.start().wait(LIMIT_S) == 0, attacked.log()
    if how == "flipped bit" or victim.name != last:  # of the very last, nobody can know that it was there
        # If the archive that takes its place is there already, it is that which nothing names.
        assert victim.name in attacked.log() or "is named by no record" in attacked.log()
    assert {*whole} <= {*read_history(attacked.run).checkpoints}
    assert min(step for _, step in attacked.restored()[-2:]) >= newest
