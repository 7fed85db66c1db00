"""Snapshots outlive the driver: one that takes its workers over restores from them, too."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from everstep.observe.registry import live_runs
from everstep.process import kernel
from everstep.testing import LocalCluster
from processes import LIMIT_S, wait_for

from .agents import agents, host_of, wait_for_copies
from .runs import World

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

SCRIPT = """
import sys
from pathlib import Path
from everstep import CheckpointConfig, Deadlines, FailureConfig, MemoryConfig, RunConfig, ScalingConfig
from everstep.testing import LocalCluster
from everstep.torch import TorchTrainer
from snapshots.training import steps

HERE = Path(__file__).parent
TorchTrainer(
    steps,
    engine=LocalCluster(0, folder=Path(sys.argv[3])) if sys.argv[3:] else "local",
    train_loop_config={"notes": str(HERE / "notes"), "until": str(HERE / "until")},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name=sys.argv[1],
        storage_path=str(HERE / "runs"),
        failure_config=FailureConfig(max_failures=-1),
        checkpoint_config=CheckpointConfig(storage_every_s=3600, memory=MemoryConfig(every_s=0)),
        deadlines=Deadlines(take_over_s=float(sys.argv[2])),
    ),
).fit()
"""


def start(
    folder: Path, name: str, cluster: LocalCluster | None = None, take_over_s: float = LIMIT_S
) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    where = [str(cluster.folder)] if cluster is not None else []
    return subprocess.Popen(
        [sys.executable, str(script), name, str(take_over_s), *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """It lives, and does nothing."""
    kernel.send_signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        kernel.send_signal(pid, signal.SIGCONT)


def said(driver: subprocess.Popen[str], what: str) -> str:
    """The line that says so; workers must not have been started before it."""
    assert driver.stdout is not None
    lines: list[str] = []
    for line in driver.stdout:
        lines.append(line)
        if what in line:
            return line
        assert "attempt 2" not in line, "".join(lines)
    raise AssertionError("".join(lines))


def test_a_later_driver_restores_what_workers_of_an_earlier_one_had(tmp_path: Path) -> None:
    world = World(tmp_path)
    name = f"memory-{random.getrandbits(32):08x}"
    process = start(tmp_path, name)
    world.wait_for_step(1, 5)
    process.kill()
    process.communicate()
    alone = world.newest_step(1)
    world.wait_for_step(1, alone + 3)  # without a driver they train on
    process = start(tmp_path, name)
    wait_for(lambda: name in live_runs() and live_runs()[name].driver_pid == process.pid, "a take-over")
    driven = world.newest_step(1)
    world.wait_for_step(1, driven + 3)
    os.kill(world.of_epoch(1)[1][-1]["pid"], signal.SIGKILL)
    world.wait_for_step(2, 1)
    assert world.check_restored(2) > driven
    world.until.touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "state from memory" in output


def test_an_agent_that_is_slow_to_answer_is_waited_for_by_each_driver(world: World) -> None:
    name = f"memory-{random.getrandbits(32):08x}"
    process = start(world.folder, name)
    world.wait_for_step(1, 5)
    process.kill()
    process.communicate()
    (agent,) = agents().values()
    with stopped(agent):
        for _ in range(2):  # each is killed in the middle of its take-over
            process = start(world.folder, name)
            said(process, "waiting for an answer from")
            process.kill()
            process.communicate()
        process = start(world.folder, name)
        said(process, "waiting for an answer from")
    said(process, "took over 2 workers")
    driven = world.newest_step(1)
    world.wait_for_step(1, driven + 3)
    os.kill(world.of_epoch(1)[1][-1]["pid"], signal.SIGKILL)
    world.wait_for_step(2, 1)
    assert world.check_restored(2) > driven
    world.until.touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "state from memory" in output


def test_what_the_other_hosts_have_is_restored_where_one_does_not_answer_in_time(world: World) -> None:
    name = f"memory-{random.getrandbits(32):08x}"
    with LocalCluster(slices=3) as cluster:
        process = start(world.folder, name, cluster)
        copied = wait_for_copies(2, 1)
        process.kill()
        process.communicate()
        silent = host_of(world.of_epoch(1)[1][-1]["pid"])
        with stopped(agents()[silent]):
            process = start(world.folder, name, cluster, take_over_s=2.0)
            assert silent in said(process, "waiting for an answer from")
            world.wait_for_step(2, 1)
            assert world.check_restored(2) >= copied.report
            world.until.touch()
            output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "from memory (resumed)" in output
