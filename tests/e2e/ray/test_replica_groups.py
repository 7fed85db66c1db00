"""Replica groups on Ray: those that are killed, or on a lost host, are replaced; the others never stop."""

from __future__ import annotations

from pathlib import Path

import psutil

from e2e.test_replica_groups import Groups, records
from everstep.control.commands import RecoveryDecided
from everstep.observe.registry import live_runs

from .cluster import RayCluster


def test_a_killed_group_and_those_of_a_lost_host_are_replaced_while_the_others_go_on(
    cluster: RayCluster, tmp_path: Path
) -> None:
    for _ in range(3):
        cluster.add_node({}, {}, cpus=2)
    run = Groups(tmp_path, engine="ray")
    run.wait_together(4)
    before = run.pids()
    run.kill(1, inside=True)
    run.wait_together(4, but=[before[1]])
    assert {**run.pids(), 1: 0} == {**before, 1: 0}

    before = run.pids()
    node = next(worker.host for worker in live_runs()["groups"].workers if worker.rank == 0)
    lost = [worker.rank for worker in live_runs()["groups"].workers if worker.host == node]
    others = [rank for rank in range(4) if rank not in lost]
    template = psutil.Process(before[0]).parent()
    assert template is not None
    template.parent().kill()  # the agent, and with it all that is on its host; also the lighthouse
    run.wait_together(4, but=[before[rank] for rank in lost])
    assert run.pids(others) == {rank: before[rank] for rank in others}
    result = run.end()
    assert len(run.digests()) == 1
    assert [decided.groups for decided in records(result, RecoveryDecided)] == [(1,), tuple(lost)]
