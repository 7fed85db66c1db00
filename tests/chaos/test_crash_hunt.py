"""Whatever is killed, at whatever instant: every committed checkpoint is there, and whole.

``EVERSTEP_HUNT_SEED=…`` replays a hunt's choices (what to kill, and after how long).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.journal import journal
from everstep.journal.history import History, read_history
from everstep.observe.registry import hosts_of, live_runs
from everstep.process import kernel
from everstep.storage.restore import verify
from everstep.storage.store import Store, open_store
from processes import ours, wait_for
from storage.server import S3Server

from .ledgers import check_ledger

TARGETS = ("driver", "agent", "worker", "uploading worker", "everything")


@pytest.fixture
def storage(place: str, tmp_path: Path) -> Iterator[dict[str, Any]]:
    if place == "folder":
        yield {"storage_path": str(tmp_path / "runs"), "storage_options": None}
        return
    with S3Server() as server:
        bucket = server.bucket()
        yield {"storage_path": f"s3://{bucket}/runs", "storage_options": server.options()}


def committed_in(run: Store) -> set[str]:
    return set(read_history(run).checkpoints)


def check(run: Store, rng: random.Random) -> set[str]:
    """Every committed checkpoint is there, and whole; returns their names."""
    found = [*journal.read(run)]
    history = History.of(found)
    committed = sorted(history.checkpoints)
    newest = history.newest
    # All of them would take too long after a while: the newest always, and some of the others.
    some = {*rng.sample(committed, min(5, len(committed))), *([newest.ref.folder] if newest else [])}
    for folder in some:
        verify(run.child(folder))
    check_ledger(found)
    folders = set(run.folders())
    assert set(committed) <= folders, f"missing: {set(committed) - folders}"
    return set(committed)


def drives(name: str, pid: int) -> bool:
    live = live_runs().get(name)
    return live is not None and live.driver_pid == pid


def is_uploading(sign: Path, pid: int) -> bool:
    try:
        return sign.read_text() == str(pid)
    except FileNotFoundError:
        return False


LEG = 25
"""Deaths in one run. One with many thousands of checkpoints would hunt for slowness of the server instead."""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("place", "deaths"),
    [
        ("folder", len(TARGETS)),
        ("s3", 2),
        *(pytest.param(place, 250, marks=pytest.mark.soak) for place in ("folder", "s3")),
    ],
)
def test_no_committed_checkpoint_is_lost_or_torn(
    storage: dict[str, Any], place: str, deaths: int, tmp_path: Path
) -> None:
    seed = int(os.environ.get("EVERSTEP_HUNT_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"EVERSTEP_HUNT_SEED={seed}")
    rng = random.Random(seed)
    kept = 0
    for first in range(0, deaths, LEG):
        folder = tmp_path / f"from-{first}"
        folder.mkdir()
        kept += hunt(storage, min(LEG, deaths - first), rng, folder)
    print(f"{place}: {deaths} deaths, {kept} checkpoints, none lost")


def hunt(storage: dict[str, Any], rounds: int, rng: random.Random, tmp_path: Path) -> int:
    """So many deaths in one run. Returns how many checkpoints it has in the end."""
    name = f"hunt-{rng.getrandbits(32):08x}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    settings = json.dumps({"name": name, "scratch": str(scratch), **storage})
    run = open_store(storage["storage_path"], storage["storage_options"]).child(name)
    hunted = str(Path(__file__).parent / "hunted.py")
    kept: set[str] = set()
    targets = [target for _ in range(0, rounds, len(TARGETS)) for target in rng.sample(TARGETS, len(TARGETS))]
    for n, target in enumerate(targets[:rounds]):
        log = (tmp_path / f"round-{n}.log").open("w")
        process = subprocess.Popen([sys.executable, hunted, settings], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda driver=process.pid: drives(name, driver), f"a driver in round {n}")
            found = committed_in(run)
            assert kept <= found, f"round {n}: {kept - found} are gone"
            kept = found
            wait_for(
                lambda before=kept: committed_in(run) > before, f"a new checkpoint in round {n}", look_s=0.5
            )
            pause = rng.random() * 0.3
            time.sleep(pause)  # the instant is what is hunted for: it must not depend on anything
            live = live_runs()[name]
            match target:
                case "driver":
                    process.kill()
                case "agent":
                    for host in hosts_of(live).values():
                        os.kill(host.pid, signal.SIGKILL)
                case "worker":
                    os.kill(rng.choice(live.workers).pid, signal.SIGKILL)
                case "uploading worker":
                    victim = rng.choice(live.workers)
                    sign = scratch / f"uploading-{victim.rank}"
                    wait_for(lambda sign=sign, pid=victim.pid: is_uploading(sign, pid), "an upload")
                    time.sleep(rng.random() * 0.01)
                    os.kill(victim.pid, signal.SIGKILL)
                case "everything":
                    for pid in [process.pid, *ours()]:
                        kernel.send_signal(pid, signal.SIGKILL)
            now = check(run, rng)
            assert kept <= now, f"round {n}: {kept - now} are gone after the death of {target}"
            kept = now
            if target not in ("driver", "everything"):
                wait_for(lambda before=kept: committed_in(run) > before, f"recovery in round {n}", look_s=0.5)
        finally:
            process.kill()
            process.wait()
            log.close()
        if rng.random() < 0.5:  # else the next round takes the workers over
            for pid in ours():
                kernel.send_signal(pid, signal.SIGKILL)
            wait_for(lambda: not ours(), "the end of all")
        now = check(run, rng)
        assert kept <= now, f"round {n}: {kept - now} are gone"
        kept = now
    for pid in ours():
        kernel.send_signal(pid, signal.SIGKILL)
    return len(kept)
