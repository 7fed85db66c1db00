"""Snapshots in the memory of hosts: what they outlive, and what is restored from them."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import signal
import socket
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest

from everstep import MemoryConfig
from everstep.agent.memory import PACKETS, Memory, MemoryLine, WorkersMemory
from everstep.control.commands import Recovered
from everstep.journal import journal
from everstep.snapshots.segments import Segment, Slot
from everstep.testing import LocalCluster
from processes import ours, wait_for

from .runs import Fit, World
from .training import steps

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

NEVER_S = 3600.0
"""No state is written to storage while such a run trains: what it restores comes from memory."""


def recoveries(world: World) -> list[Recovered]:
    """What the journal says of them."""
    return [record for record in journal.read(world.folder / "runs" / "run") if isinstance(record, Recovered)]


def segments(pid: int) -> list[str]:
    """Descriptors of snapshots that a process holds."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed just now
            link = os.readlink(fd)
            if "memfd:everstep-" in link and "-progress" not in link:
                found.append(str(fd))
    return found


def newest_snapshot() -> int:
    """The report of the newest that a rank has."""
    found = []
    for agent in agents():
        for path in segments(agent):
            with suppress(FileNotFoundError):
                if "notes" in os.readlink(path) and os.stat(path).st_size:
                    slot = Slot(Segment(os.open(path, os.O_RDWR)), {})
                    found += [slot.label.index] if slot.label is not None else []
                    slot.close()
    return max(found)


def agents() -> list[int]:
    return [pid for pid, command in ours().items() if "everstep.agent " in f"{command} " and segments(pid)]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_loses_at_most_one_step_without_any_checkpoint(world: World) -> None:
    fit = Fit(world.trainer(steps, every_s=NEVER_S))
    for epoch in (1, 2):
        world.wait_for_step(epoch, 5 * epoch)
        kill(world.of_epoch(epoch)[epoch - 1][-1]["pid"])
        world.wait_for_step(epoch + 1, 1)
        step = world.check_restored(epoch + 1)
        reported = min(
            max(n["step"] for n in each if n.get("reported")) for each in world.of_epoch(epoch).values()
        )
        assert step >= reported > 0, "older than the newest that was whole"
    assert world.checkpoints() == []
    world.until.touch()
    fit.done()
    assert all(re.fullmatch(r"memory, report \d+, \d\.\d s old", r.state_from) for r in recoveries(world))
    assert all(r.steps_lost <= 1 for r in recoveries(world))


def test_ranks_killed_at_any_instant_restore_what_all_of_them_had_at_one_step(
    world: World, rng: random.Random
) -> None:
    strike_at_random(world, rng, 4)


@pytest.mark.soak
def test_ranks_killed_at_any_instant_many_times(world: World, rng: random.Random) -> None:
    strike_at_random(world, rng, 150)


def strike_at_random(world: World, rng: random.Random, times: int) -> None:
    """With a state that takes long to copy, so that most are killed in the middle of that."""
    fit = Fit(world.trainer(steps, every_s=NEVER_S, config={"floats": 4 << 20}))
    newest = 0
    for epoch in range(1, times + 1):
        world.wait_for_step(epoch, newest + 2)
        time.sleep(rng.random() * 0.3)  # the instant is what is drawn here, nothing is waited for
        for rank in rng.choice([[0], [1], [0, 1]]):
            kill(world.of_epoch(epoch)[rank][-1]["pid"])
        wait_for(lambda e=epoch: len(restored(world, e + 1)) == 2, f"attempt {epoch + 1}")
        step = world.check_restored(epoch + 1)
        whole = min(reported_step(world, epoch, rank) for rank in (0, 1))
        assert step >= whole, "older than the newest that was whole"
        newest = step
    world.until.touch()
    fit.done()


def restored(world: World, epoch: int) -> list[dict[str, object]]:
    return [n for each in world.of_epoch(epoch).values() for n in each if n.get("restored")]


def reported_step(world: World, epoch: int, rank: int) -> int:
    return max((n["step"] for n in world.of_epoch(epoch)[rank] if n.get("reported")), default=0)


def test_a_damaged_snapshot_is_noticed_and_storage_is_used(world: World) -> None:
    fit = Fit(world.trainer(steps, every_s=0.2))
    world.wait_for_step(1, 3)
    wait_for(world.checkpoints, "a checkpoint")
    (agent,) = agents()
    frozen = [each[-1]["pid"] for each in world.of_epoch(1).values()]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    for path in segments(agent):
        # What has been written to storage meanwhile is closed.
        with suppress(FileNotFoundError):
            if "shared" in os.readlink(path):
                with open(path, "r+b") as segment:
                    segment.seek(-4, os.SEEK_END)
                    segment.write(b"\xff\xff\xff\xff")
    kill(frozen[0])
    world.wait_for_step(3, 1)
    assert world.check_restored(3) > 0
    assert restored(world, 2) == [], "nobody starts from what is damaged"
    world.until.touch()
    fit.done()


def test_the_memory_of_a_run_is_given_back_at_its_end(world: World) -> None:
    with LocalCluster(slices=1, workers_per_host=2) as cluster:
        fit = Fit(world.trainer(steps, every_s=NEVER_S, engine=cluster))
        world.wait_for_step(1, 3)
        (agent,) = agents()
        assert len(segments(agent)) > 0
        world.until.touch()
        fit.done()
        wait_for(lambda: not segments(agent), "memory given back")


def test_without_enough_memory_the_run_says_so_and_goes_on_with_storage_alone(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    fit = Fit(world.trainer(steps, every_s=0.2, memory=MemoryConfig(every_s=0, host_fraction=1e-9)))
    world.wait_for_step(1, 3)
    wait_for(world.checkpoints, "a checkpoint")
    wait_for(lambda: agents() == [], "no memory held but for what is being written to storage")
    kill(world.of_epoch(1)[0][-1]["pid"])
    world.wait_for_step(2, 1)
    assert world.check_restored(2) > 0
    world.until.touch()
    fit.done()
    assert [r.state_from.split(",")[0] for r in recoveries(world)] == ["storage"]
    said = [line for line in capfd.readouterr().err.splitlines() if "no snapshots in memory" in line]
    assert len(said) == 1
    assert re.search(r"MiB needed, and snapshots may have 0 MiB \(0% of the host's [0-9.]+ GiB\)", said[0])


def test_an_agent_that_can_have_no_memory_says_so_to_its_worker() -> None:
    memory, (agents_end, workers_end) = Memory(), socket.socketpair(socket.AF_UNIX, PACKETS)
    workers_end.settimeout(10)
    worker = WorkersMemory(workers_end)
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def serve() -> list[tuple[int, Slot]]:
        line = MemoryLine(0, agents_end, memory, 0.9, Mock(), Mock())
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        try:
            return await asyncio.to_thread(worker.new_slots, {"small": 64, "state": 1 << 20}, 2, needed=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
            line.close()

    assert asyncio.run(serve()) == []
    assert "2 MiB needed, and the host's agent can't have it: [Errno 27]" in worker.refused
    assert not segments(os.getpid()), "what was made of it is closed"


def test_snapshots_are_as_far_apart_as_the_run_asks_for(world: World) -> None:
    fit = Fit(world.trainer(steps, every_s=NEVER_S, memory=MemoryConfig(every_s=NEVER_S)))
    world.wait_for_step(1, 3)
    newest = 0
    while newest != (newest := newest_snapshot()):  # until ranks are told how far apart, every step has one
        world.wait_for_step(1, world.newest_step(1) + 20)
    kill(world.of_epoch(1)[0][-1]["pid"])
    world.wait_for_step(2, 1)
    assert world.check_restored(2) == newest
    world.until.touch()
    fit.done()
    assert recoveries(world)[0].steps_lost >= 20


def test_a_host_that_is_lost_takes_its_snapshots_along(world: World) -> None:
    with LocalCluster(slices=3) as cluster:
        fit = Fit(world.trainer(steps, every_s=0.2, engine=cluster))
        world.wait_for_step(1, 3)
        wait_for(world.checkpoints, "a checkpoint")
        cluster.kill_host(sorted(cluster.hosts)[0])
        world.wait_for_step(2, 1)
        assert world.check_restored(2) > 0
        world.until.touch()
        fit.done()
