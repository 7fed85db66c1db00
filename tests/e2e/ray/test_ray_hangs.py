"""A worker hangs on one host of a Ray cluster, and those on another wait for it."""

from __future__ import annotations

from pathlib import Path

from e2e import hanging
from everstep import Deadlines
from everstep.control.commands import HangSeen, Recovered
from everstep.failures import Kind

from .cluster import LONE, RayCluster, Running


def test_a_hang_on_another_host_is_blamed_on_its_rank(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add_lone_host("slice-0")
    cluster.add_lone_host("slice-1")
    run = Running(
        tmp_path,
        hanging.with_barriers,
        2,
        scaling=LONE,
        max_failures=1,
        config={"steps": 30, "rank": 1, "at": 20, "ways": ["sleep"]},
        deadlines=Deadlines(hang_s=3.0, hang_look_s=0.25),
    )
    run.finish()
    [hang] = run.records(HangSeen)
    assert hang.ranks == (1,)
    assert "in sleep" in hang.message
    [recovered] = [r for r in run.records(Recovered) if r.cause is not None]
    assert recovered.cause.kind is Kind.HANG
    assert (run.path / hang.stacks).read_text().startswith("=== rank 1 ")
