"""The examples are run as a user runs them, and broken while they run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep import Result
from everstep.control.commands import Recovered, RecoveryDecided
from everstep.journal import journal, records
from everstep.observe.registry import live_runs
from processes import LIMIT_S, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HOME": str(home)},
    )


def committed(folder: Path) -> int:
    return sum(isinstance(record, records.Committed) for record in journal.read(folder))


def test_the_entrypoint_script_survives_its_workers_and_resumes_after_its_own_death(tmp_path: Path) -> None:
    arguments = ("--storage_path", str(tmp_path), "--run_name", "unique", "--num_epochs", "400")
    folder = tmp_path / "unique"
    process = run("torch_fault_tolerance.py", *arguments, home=tmp_path)
    try:
        for kill in range(2):
            # Later checkpoints than the last time: the run goes on between the kills.
            wait_for(lambda kill=kill: committed(folder) >= 5 + 20 * kill, "checkpoints")
            worker = random.choice(live_runs()["unique"].workers)
            os.kill(worker.pid, signal.SIGKILL)
        wait_for(lambda: sum(isinstance(r, Recovered) for r in journal.read(folder)) == 2, "two recoveries")
    finally:
        process.kill()
        process.communicate()
    before = Result.from_path(str(folder))
    again = run("torch_fault_tolerance.py", *arguments, home=tmp_path)
    output, _ = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, output
    result = Result.from_path(str(folder))
    assert result.metrics is not None
    assert result.metrics["epoch"] == 399
    assert len(result.metrics_history) > len(before.metrics_history) > 0
    assert "took over 4 workers, which never stopped" in output


@pytest.mark.parametrize("script", ["elastic_torch_dcp.py", "elastic_jax_orbax.py"])
def test_a_sharded_checkpoint_is_restored_at_another_size(tmp_path: Path, script: str) -> None:
    process = run(script, str(tmp_path), home=tmp_path)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "steps on 4 → 2 → 4 workers" in output


def test_the_curve_is_the_same_whatever_happens(tmp_path: Path) -> None:
    process = run("exactly_once.py", str(tmp_path), home=tmp_path)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "120 steps, 5 kills, 3 → 2 → 3 workers" in output
    assert "at most: the same" in output


def test_a_preempted_slice_is_left_in_time(tmp_path: Path) -> None:
    process = run("preemption.py", str(tmp_path), home=tmp_path)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "0 steps lost" in output
    assert "max_failures" not in output


def test_the_shortest_script_survives_a_kill(tmp_path: Path) -> None:
    process = run("worker_failures.py", home=tmp_path)
    wait_for(lambda: any(name.startswith("train_run-") for name in live_runs()), "the run")
    (live,) = [r for name, r in live_runs().items() if name.startswith("train_run-")]
    os.kill(live.workers[0].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "recovered in" in output


@pytest.mark.parametrize(("script", "size"), [("torchft_ddp.py", 1), ("torchft_sharded.py", 2)])
def test_torchfts_script_goes_on_while_a_group_is_replaced(tmp_path: Path, script: str, size: int) -> None:
    arguments = ("--storage_path", str(tmp_path), "--run_name", "torchft", "--num_steps", "120")
    process = run(script, *arguments, home=tmp_path)
    try:
        wait_for(lambda: "torchft" in live_runs() and committed(tmp_path / "torchft"), "a checkpoint")
        before = {worker.rank: worker.pid for worker in live_runs()["torchft"].workers}
        victim = random.choice(sorted(before))
        os.kill(before[victim], signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "replace the failed replica groups" in output
    decided = [r.groups for r in journal.read(tmp_path / "torchft") if isinstance(r, RecoveryDecided)]
    assert decided == [(victim // size,)], "its own group, and no other"
    result = Result.from_path(str(tmp_path / "torchft"))
    assert result.metrics is not None
    assert result.metrics["step"] == 120
