"""Kills at random instants, of workers, agent and driver: what is restored is what all ranks had at one step,
never older than the newest that was whole, and nothing is left over.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from everstep.observe.registry import live_runs
from everstep.snapshots.layout import Index
from everstep.snapshots.segments import Segment, Slot
from everstep.testing import LocalCluster
from noted import notes
from processes import LIMIT_S, ours, wait_for

from .agents import agents, host_of, wait_for_copies
from .runs import World

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

RANKS = (0, 1)
SCRIPT = """
import sys
from pathlib import Path
from everstep import CheckpointConfig, FailureConfig, MemoryConfig, RunConfig, ScalingConfig
from everstep.torch import TorchTrainer
from everstep.testing import LocalCluster

HERE = Path(__file__).parent

def train(config):
    from snapshots.training import steps  # not in every driver: torch takes seconds

    return steps(config)

TorchTrainer(
    train,
    engine=LocalCluster(0, folder=Path(sys.argv[2])) if sys.argv[2:] else "local",
    train_loop_config={
        "notes": str(HERE / "notes"), "until": str(HERE / "until"), "floats": 1 << 20, "own": 1 << 19,
    },
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name=sys.argv[1],
        storage_path=str(HERE / "runs"),
        failure_config=FailureConfig(max_failures=-1),
        checkpoint_config=CheckpointConfig(storage_every_s=1, num_to_keep=2, memory=MemoryConfig(every_s=0)),
    ),
).fit()
"""


class Struck:
    """A run whose parts are killed, and which is started again when its driver is."""

    def __init__(self, folder: Path, rng: random.Random, cluster: LocalCluster | None = None) -> None:
        """``cluster``: its hosts are killed as well."""
        self.world = World(folder)
        self._cluster = cluster
        self._rng = rng
        self._name = f"kills-{rng.getrandbits(32):08x}"
        self._script = folder / "script.py"
        self._script.write_text(SCRIPT)
        self.driver = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                str(self._script),
                self._name,
                *([str(self._cluster.folder)] if self._cluster is not None else []),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def attempt(self) -> int:
        """The newest in which every rank has begun."""
        each = [
            {n["epoch"] for n in found if n.get("restored")} for found in notes(self.world.notes).values()
        ]
        return max(set.intersection(*each), default=0) if len(each) == len(RANKS) else 0

    def strike(self, *victims: str) -> None:
        """Kill these in one instant, and see what is restored."""
        world, before = self.world, self.attempt
        time.sleep(self._rng.random() * 0.5)  # the instant is what is drawn here, nothing is waited for
        hosts = [host_of(self._pid_of(self._rng.choice(RANKS)))] if "host" in victims else []
        floor = self._floor(victims, hosts)
        for pid in [pid for victim in victims for pid in self._pids(victim)]:
            os.kill(pid, signal.SIGKILL)
        for host in hosts:
            self._replace(host)
        if "driver" in victims:
            self.driver.communicate()
            self.driver = self._start()
        if victims == ("driver",):
            wait_for(self._is_taken_over, "a take-over")
            world.wait_for_step(self.attempt, world.newest_step(self.attempt) + 2)
            return
        wait_for(lambda: self.attempt > before, f"an attempt after {before}, and the death of {victims}")
        assert world.check_restored(self.attempt) >= floor, f"{victims}: older than the newest that was whole"
        world.wait_for_step(self.attempt, world.newest_step(self.attempt) + 2)

    def _is_taken_over(self) -> bool:
        return self._name in live_runs() and live_runs()[self._name].driver_pid == self.driver.pid

    def _pids(self, victim: str) -> list[int]:
        match victim:
            case "driver":
                return [self.driver.pid]
            case "agent":
                return _agents()
            case "host":
                return []  # its agent goes with it
            case "worker":
                return [self._pid_of(self._rng.choice(RANKS))]
            case _:
                return [self._pid_of(rank) for rank in RANKS]

    def _pid_of(self, rank: int) -> int:
        return int(self.world.of_epoch(self.attempt)[rank][-1]["pid"])

    def _floor(self, victims: tuple[str, ...], hosts: list[str]) -> int:
        """The newest step that is whole without these."""
        saved = self.in_storage()
        if "agent" in victims:
            return saved
        there = agents()
        steps = self._in_memory([pid for host, pid in there.items() if host not in hosts])
        # Of the newest that is on other hosts, the driver may not have heard.
        return max([saved, *(steps[-2:-1] if hosts else steps[-1:])])

    def _replace(self, host: str) -> None:
        """The machine is gone, and another one comes."""
        assert self._cluster is not None
        name = self._cluster.hosts[host].slice
        self._cluster.kill_host(host)
        self._cluster.remove_slice(name)
        self._cluster.add_slice()

    def _in_memory(self, there: Collection[int]) -> list[int]:
        """Steps of which every rank has a snapshot, in the memory of these agents."""
        whole: dict[int, set[int]] = {rank: set() for rank in RANKS}
        for slot in _slots(there):
            label = slot.label
            index = Index.decoded(slot.notes) if label is not None else None
            if index is not None and slot.label == label:
                whole[index.rank].add(index.step)
            slot.close()
        return sorted(set.intersection(*whole.values())) or [0]

    def in_storage(self) -> int:
        """The step of the newest committed checkpoint."""
        folder = self.world.folder / "runs" / self._name
        found = sorted(folder.glob("*/.manifest.json"))
        indexes = [path.parent / "state-00000.json" for path in found]
        return max((Index.decoded(path.read_bytes()).step for path in indexes if path.exists()), default=0)

    def finish(self) -> None:
        self.world.until.touch()
        output, _ = self.driver.communicate(timeout=LIMIT_S)
        assert self.driver.returncode == 0, output


def _agents() -> list[int]:
    return [pid for pid, command in ours().items() if "everstep.agent " in f"{command} "]


def _slots(there: Collection[int]) -> Iterator[Slot]:
    """Notes of snapshots, in the memory of agents."""
    for agent in there:
        for path in Path(f"/proc/{agent}/fd").iterdir():
            try:
                if (
                    "memfd:everstep-" in (link := os.readlink(path))
                    and "notes" in link
                    and path.stat().st_size
                ):
                    yield Slot(Segment(os.open(path, os.O_RDWR)), {})
            except FileNotFoundError:
                continue  # closed meanwhile


def test_after_the_death_of_a_host_alone_or_with_the_driver_all_ranks_have_one_steps_state_again(
    tmp_path: Path, rng: random.Random
) -> None:
    with LocalCluster(slices=3) as cluster:
        run = Struck(tmp_path, rng, cluster)
        wait_for(lambda: run.attempt == 1 and run.in_storage() > 0, "a checkpoint")
        wait_for_copies(len(RANKS), 1)
        run.strike("driver", "host")
        run.strike("host")
        run.finish()


def test_after_the_death_of_driver_and_worker_or_of_the_agent_all_ranks_have_one_steps_state_again(
    tmp_path: Path, rng: random.Random
) -> None:
    run = Struck(tmp_path, rng)
    wait_for(lambda: run.attempt == 1 and run.in_storage() > 0, "a checkpoint")
    run.strike("driver", "worker")
    run.strike("agent")
    run.finish()


@pytest.mark.soak
def test_whatever_is_killed_at_any_instant_many_times(tmp_path: Path, rng: random.Random) -> None:
    kinds = [
        ("worker",),
        ("workers",),
        ("driver",),
        ("agent",),
        ("driver", "worker"),
        ("driver", "workers"),
        ("driver", "agent"),
    ]
    run = Struck(tmp_path, rng)
    wait_for(lambda: run.attempt == 1, "a start")
    run.world.wait_for_step(1, 3)
    for _ in range(int(os.environ.get("EVERSTEP_KILLS", "500"))):
        run.strike(*rng.choice(kinds))
    run.finish()


@pytest.mark.soak
def test_hosts_and_whatever_else_killed_at_any_instant_many_times(tmp_path: Path, rng: random.Random) -> None:
    """In the middle of copies to other hosts, too: each rank has so much of its own that most are."""
    kinds = [
        ("worker",),
        ("workers",),
        ("driver",),
        ("host",),
        ("driver", "worker"),
        ("driver", "host"),
        ("worker", "host"),
        ("driver", "worker", "host"),
    ]
    with LocalCluster(slices=3) as cluster:
        run = Struck(tmp_path, rng, cluster)
        wait_for(lambda: run.attempt == 1, "a start")
        run.world.wait_for_step(1, 3)
        for _ in range(int(os.environ.get("EVERSTEP_KILLS", "500"))):
            run.strike(*rng.choice(kinds))
        run.finish()
