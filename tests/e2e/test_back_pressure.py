"""What a driver or a disk can't take just now waits where it is: nothing is lost, nobody else is held up, and
no memory fills.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from everstep import RunConfig, ScalingConfig, Trainer, WorkerGroupError
from processes import LIMIT_S, alive, ours, wait_for

from .scripts import start
from .test_worker_deaths import Fit

TALKS = """
def talks(config):
    (HERE / "up").touch()
    while not (HERE / "go").exists():
        time.sleep(0.005)
    for step in range(1, config["steps"] + 1):
        everstep.report({"step": step, "blob": "x" * (1 << 18)})
        (HERE / "reported").write_text(str(step))
    print("x" * config["prints"])
    (HERE / "printed").touch()

result = everstep.Trainer(
    talks,
    train_loop_config={"steps": STEPS, "prints": PRINTS},
    run_config=RunConfig(storage_path=str(HERE / "runs")),
).fit()
print("steps", [row["step"] for row in result.metrics_history])
"""


def start_talking(tmp_path: Path, steps: int = 0, prints: int = 0) -> tuple[subprocess.Popen[str], int]:
    """(the driver, its agent's pid): the worker waits for the file ``go``."""
    process = start(tmp_path, f"import everstep\nSTEPS, PRINTS = {steps}, {prints}\n{TALKS}")

    def up() -> bool:
        assert process.poll() is None, process.communicate()
        return (tmp_path / "up").exists()

    wait_for(up, "the worker")
    (agent,) = [pid for pid, command in ours().items() if "-m everstep.agent " in command]
    return process, agent


def test_reports_that_the_disk_has_no_room_for_wait_and_none_is_lost(tmp_path: Path) -> None:
    process, agent = start_talking(tmp_path, steps=64)
    _, hard = resource.prlimit(agent, resource.RLIMIT_FSIZE)
    # The agent's files may have 1 MiB each: for it, the disk is full. Its driver acknowledges nothing.
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (1 << 20, hard))
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()

    def is_full() -> bool:
        return any(path.stat().st_size == 1 << 20 for path in tmp_path.rglob("*.spool*"))

    wait_for(is_full, "a spool that can't grow")
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (hard, hard))
    wait_for(lambda: (tmp_path / "reported").read_text() == "64", "the reports that waited for room")
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert f"steps {list(range(1, 65))}" in output


def test_reports_go_on_once_they_are_acknowledged_although_the_disk_stays_full(tmp_path: Path) -> None:
    process, agent = start_talking(tmp_path, steps=64)
    _, hard = resource.prlimit(agent, resource.RLIMIT_FSIZE)
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (1 << 20, hard))
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    wait_for(
        lambda: any(path.stat().st_size == 1 << 20 for path in tmp_path.rglob("*.spool*")), "a full spool"
    )
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert f"steps {list(range(1, 65))}" in output


def test_a_driver_that_is_stopped_does_not_fill_its_agents_memory_with_output(tmp_path: Path) -> None:
    process, agent = start_talking(tmp_path, prints=200 << 20)

    def memory() -> int:
        status = Path(f"/proc/{agent}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) << 10

    before = memory()
    process.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    wait_for(lambda: (tmp_path / "printed").exists(), "the worker's last line")
    grown = memory() - before
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert grown < 50 << 20, "the log has all of it, and the agent none"
    assert "bytes printed by rank 0 are not shown here" in output + errors


def hears_much(config: dict[str, Any]) -> None:
    """Rank 0 sends everybody more than a socket takes; rank 1 dies; rank 2 is stopped by the test."""
    import time

    from everstep import collective, get_context

    here, rank = Path(config["here"]), get_context().get_world_rank()
    (here / f"up-{rank}.tmp").write_text(str(os.getpid()))
    (here / f"up-{rank}.tmp").rename(here / f"up-{rank}")
    while rank == 0 and not (here / "go").exists():
        time.sleep(0.005)
    collective.broadcast_from_rank_zero(b"x" * (8 << 20))
    (here / f"heard-{rank}").touch()
    if rank == 1:
        while not (here / "heard-0").exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_worker_that_does_not_read_keeps_nobody_from_noticing_another_ones_death(tmp_path: Path) -> None:
    fit = Fit(
        lambda: Trainer(
            hears_much,
            train_loop_config={"here": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=3),
            run_config=RunConfig(storage_path=str(tmp_path / "runs")),
        )
    )
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(3)), "workers")
    frozen = int((tmp_path / "up-2").read_text())
    # It has asked for the broadcast once all its threads sleep; then it is stopped, and reads no answer.
    wait_for(lambda: asleep(frozen), "rank 2 waiting for rank 0")
    os.kill(frozen, signal.SIGSTOP)
    (tmp_path / "go").touch()
    with pytest.raises(WorkerGroupError, match="rank 1 .*SIGKILL"):
        fit.done()
    wait_for(lambda: not alive(frozen), "the end of the worker that was stopped")


def asleep(pid: int) -> bool:
    """Whether all threads of a process wait, two looks in a row at the same processor time."""
    import time

    def look() -> tuple[set[str], list[str]]:
        stats = [
            (task / "stat").read_text().rsplit(")", 1)[1].split()
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        return {fields[0] for fields in stats}, [part for fields in stats for part in fields[11:13]]

    first = look()
    time.sleep(0.5)
    return first == look() and first[0] == {"S"}
