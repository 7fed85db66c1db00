"""Whole slices or none, on a real Ray cluster: waiting, growing, shrinking, and what it costs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from e2e.training import elastic_steps
from everstep.control.commands import GroupStarted, Recovered, Rung, Waiting
from processes import wait_for

from .cluster import RayCluster, Running, everstep_groups
from .test_handles import see_node


def test_a_run_waits_grows_shrinks_and_grows_again(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add_host("slice-0", 0)
    run = Running(tmp_path, elastic_steps, (2, 4), max_failures=1)
    wait_for(lambda: run.records(Waiting), "the wait")
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
    assert started[-3:] == [(4, Rung.PLANNED), (2, Rung.SHRINK), (4, Rung.PLANNED)]
    # Growing lost no step, shrinking none that was committed.
    resizes = [r for r in run.records(Recovered) if r.rung is Rung.PLANNED]
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


def test_ranks_follow_the_hosts_of_a_slice_as_the_operator_numbered_them(
    cluster: RayCluster, tmp_path: Path
) -> None:
    nodes = {}
    for index in (2, 0, 1):
        labels = {"everstep.dev/slice": "cpu-0", "everstep.dev/slice-host": str(index)}
        nodes[index] = cluster.add_node(labels, {}, cpus=1)
    run = Running(tmp_path, see_node, 3, scaling={"slice_label": "everstep.dev/slice"})
    run.wait()
    assert {n["rank"]: n["node"] for n in run.notes()} == nodes


def test_a_slice_that_is_known_by_name_and_pod_type_only_is_trained_on(
    cluster: RayCluster, tmp_path: Path
) -> None:
    for index in range(2):
        labels = {
            "ray.io/tpu-slice-name": "vm",
            "ray.io/tpu-worker-id": str(index),
            "ray.io/tpu-pod-type": "v6e-8",
        }
        cluster.add_node(labels, {"TPU": 4})
    run = Running(tmp_path, elastic_steps, 2)
    run.until_training(2)
    run.finish()
