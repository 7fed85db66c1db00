"""Hosts that were booted at different times: what happened when is told by one clock, the driver's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import everstep as train
from e2e.training import elastic_steps, note
from everstep import TrainingFailedError
from everstep.control.commands import Recovered
from processes import alive, wait_for

from .cluster import IN_ANOTHER_TIME, LONE, RayCluster, Running


def time_namespaces() -> bool:
    try:
        return subprocess.run([*IN_ANOTHER_TIME, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not time_namespaces(), reason="this kernel lets nobody have a clock of their own"),
]


@pytest.mark.parametrize("booted", ["earlier", "later"])
def test_a_recovery_takes_as_long_as_it_took_whenever_the_host_was_booted(
    cluster: RayCluster, tmp_path: Path, booted: str
) -> None:
    cluster.add_lone_host("slice-0")
    cluster.add_lone_host_at("slice-1", 3000.0 if booted == "earlier" else -time.monotonic() / 2)
    run = Running(tmp_path, elastic_steps, 2, scaling=LONE, max_failures=1)
    epoch = run.until_training(2)
    before = time.monotonic()
    os.kill(run.pids()[1], signal.SIGKILL)
    run.until_training(2, epoch)
    run.until_steps()
    [recovered] = [r for r in run.records(Recovered) if r.cause is not None]
    assert recovered.total_s <= time.monotonic() - before
    assert before <= recovered.cause.at <= recovered.at
    run.finish()


def fail_one_after_the_other(config: dict[str, Any]) -> None:
    """Rank 1 fails first; the others do once its process is gone."""
    rank = train.get_context().get_world_rank()
    note(config, step=1, world=2)
    first = Path(config["notes"]) / "first"
    if rank == 1:
        first.write_text(str(os.getpid()))
        raise ValueError("the first")
    wait_for(first.exists, "the first failure")
    wait_for(lambda: not alive(int(first.read_text())), "the end of who failed first")
    raise ValueError("the second")


def test_the_first_cause_is_what_happened_first_whenever_the_host_was_booted(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_lone_host("slice-0")
    cluster.add_lone_host_at("slice-1", 3000.0)
    run = Running(tmp_path, fail_one_after_the_other, 2, scaling=LONE)
    with pytest.raises(TrainingFailedError, match="the first"):
        run.wait()
