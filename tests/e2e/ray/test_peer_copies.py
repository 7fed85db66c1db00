"""Snapshots on Ray nodes: copies go from agent to agent over Ray's own calls."""

from __future__ import annotations

from pathlib import Path

from snapshots.agents import host_of, wait_for_copies
from snapshots.runs import Fit, World
from snapshots.training import steps

from .cluster import RayCluster

NEVER_S = 3600.0


def test_the_ranks_of_a_lost_node_are_restored_from_another_nodes_memory(
    cluster: RayCluster, tmp_path: Path
) -> None:
    world = World(tmp_path)
    for _ in range(3):
        cluster.add_node({}, {})
    scaling = {"resources_per_worker": {"CPU": 2}}
    fit = Fit(
        world.trainer(steps, every_s=NEVER_S, engine="ray", scaling=scaling, config={"floats": 3 << 20})
    )
    try:
        world.wait_for_step(1, 3)
        copied = wait_for_copies(2, 1)
        cluster.kill_raylet(host_of(world.pid_of(1, 1)))
        world.wait_for_recovery(1)
        assert world.check_restored(world.attempt()) >= copied.report
        assert world.checkpoints() == [], "there is nothing in storage that could be read"
    finally:
        world.until.touch()
    fit.done()
    (recovered,) = world.recoveries()
    assert recovered.state_from.startswith("memory of other hosts, report ")
