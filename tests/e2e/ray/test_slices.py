"""Whole slices or none, on a real Ray cluster: waiting, growing, shrinking, and what it costs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from e2e.training import elastic_steps
from everstep.control.commands import GroupStarted, Recovered, Rung, Waiting
from processes import wait_for

from .cluster import RayCluster, Running, everstep_groups

pytestmark = pytest.mark.timeout(240)


def test_a_run_waits_grows_shrinks_and_grows_again(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add_host("slice-0", 0)
    run = Running(tmp_path, elastic_steps, (2, 4), max_failures=1)
    wait_for(lambda: run.records(Waiting), "the wait", 60.0)
    waits = run.records(Waiting)[0]
    assert waits.workers_min == 2
    assert "at least 2 workers; 0 whole slices are free; slice-0: not whole (1 of 2 hosts" in waits.message

    cluster.add_host("slice-0", 1)
    run.until_training(2)
    cluster.add_slice("slice-1")
    epoch = run.until_training(4)
    assert {n["slices"] for n in run.notes() if n["epoch"] == epoch} == {2}

    lost = next(
        n for n in cluster.nodes if cluster.nodes[n]._ray_params.labels["ray.io/tpu-slice-name"] == "slice-1"
    )
    cluster.kill_raylet(lost)
    after = run.until_training(2, epoch)
    cluster.remove(lost)
    cluster.add_host("slice-1", 0)
    run.until_training(4, after)
    run.until_steps()
    result = run.finish()
    assert result.error is None

    started = [(s.world_size, s.rung) for s in run.records(GroupStarted)]
    assert started[-3:] == [(4, Rung.RESIZE), (2, Rung.SHRINK), (4, Rung.RESIZE)]
    # Growing lost no step, shrinking none that was committed.
    resizes = [r for r in run.records(Recovered) if r.rung is Rung.RESIZE]
    assert [r.steps_lost for r in resizes] == [0, 0]
    assert max(r.steps_lost for r in run.records(Recovered)) <= 1
    assert everstep_groups() == {}


def test_a_killed_worker_is_replaced_in_place(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add_slice("slice-0")
    run = Running(tmp_path, elastic_steps, 2, max_failures=1)
    epoch = run.until_training(2)
    groups = everstep_groups()
    os.kill(run.pids()[1], signal.SIGKILL)
    run.until_training(2, epoch)
    assert everstep_groups() == groups
    run.finish()
    assert run.records(GroupStarted)[-1].rung is Rung.RESTART_IN_PLACE
