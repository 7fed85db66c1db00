"""Draining nodes: their slices are left in time, at one checkpoint, and it costs no failure."""

from __future__ import annotations

from pathlib import Path

from e2e.training import elastic_steps
from everstep import Deadlines
from everstep.control.commands import (
    CheckpointKept,
    GroupStarted,
    PreemptionSeen,
    Recovered,
    RecoveryDecided,
)
from processes import wait_for

from .cluster import LONE, RayCluster, Running

NOTICE_S = 90.0
"""Long enough for a new place to be ready in time on a busy machine, where Ray takes half a minute."""


def test_a_draining_node_is_left_with_its_slice_at_a_checkpoint(cluster: RayCluster, tmp_path: Path) -> None:
    first = cluster.add_slice("slice-0")
    run = Running(tmp_path, elastic_steps, 2, config={"save_every": "asked"})
    epoch = run.until_training(2)
    cluster.add_slice("slice-1")
    cluster.drain(first[1], NOTICE_S)
    run.until_training(2, epoch)
    run.until_steps()
    run.finish()
    assert [d.budget for d in run.records(RecoveryDecided)] == ["max_preemption_failures"]
    assert len(run.records(GroupStarted)) == 2
    assert len(run.records(CheckpointKept)) == 2, "one at the notice, and one before leaving"
    assert [r.steps_lost for r in run.records(Recovered)] == [0]


def test_a_drain_whose_deadline_passes_with_the_node_alive_restarts_nothing(
    cluster: RayCluster, tmp_path: Path
) -> None:
    node = cluster.add_lone_host("slice-0")
    run = Running(tmp_path, elastic_steps, 1, scaling=LONE, deadlines=Deadlines(notice_s=1.0))
    run.until_training(1)
    cluster.drain(node, 1.0)
    wait_for(lambda: len(run.records(PreemptionSeen)) == 2, "the notice, and that it was not meant")
    assert [seen.deadline is None for seen in run.records(PreemptionSeen)] == [False, True]
    run.until_steps()
    run.finish()
    assert len(run.records(GroupStarted)) == 1


def test_two_drains_one_after_the_other_lead_to_one_restart(cluster: RayCluster, tmp_path: Path) -> None:
    nodes = [cluster.add_lone_host(f"slice-{n}") for n in range(4)]
    run = Running(tmp_path, elastic_steps, 2, scaling=LONE)
    epoch = run.until_training(2)
    cluster.drain(nodes[0], NOTICE_S)
    wait_for(lambda: run.records(PreemptionSeen), "the first notice")
    cluster.drain(nodes[1], NOTICE_S)
    run.until_training(2, epoch)
    run.until_steps()
    run.finish()
    assert len(run.records(GroupStarted)) == 2
    assert len(run.records(RecoveryDecided)) == 1
