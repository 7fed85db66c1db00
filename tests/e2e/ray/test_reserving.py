"""All slices of a start or none; what others hold is not ours; what is missing is asked for."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from e2e.training import elastic_steps
from everstep import ConfigError, Deadlines
from everstep.control.commands import FailureSeen, GroupStarted, PreemptionSeen, Recovered, Rung, Waiting
from everstep.engine.ray import capacity, cluster as ray_cluster
from everstep.failures import Kind
from processes import LIMIT_S, wait_for

from .cluster import LONE, SCALING, RayCluster, Running, everstep_groups


def slice_groups() -> dict[str, str]:
    return {name: state for name, state in everstep_groups().items() if "/demand/" not in name}


def demands() -> list[str]:
    return [name for name, state in everstep_groups().items() if "/demand/" in name and state == "PENDING"]


def reservations_that_failed(run: Running) -> list[Any]:
    return [r for r in run.records(FailureSeen) if r.failure.kind is Kind.RESERVATION]


def test_two_broken_slices_and_one_that_others_hold_are_no_slices(
    cluster: RayCluster, tmp_path: Path
) -> None:
    for number in range(2):
        cluster.kill_raylet(cluster.add_slice(f"slice-{number}")[1])
    healthy = cluster.add_slice("slice-2")
    cluster.until_alive(2 + 2)
    held = hold(healthy, 4)
    run = Running(tmp_path, elastic_steps, 2)
    wait_for(lambda: run.records(Waiting), "the wait")
    message = run.records(Waiting)[0].message
    assert re.findall(r"slice-[0-9]: not whole", message) == [f"slice-{n}: not whole" for n in range(3)]
    assert message.count("whole") == 1 + 3, "what is wanted, and what there is"
    assert f"(in use by others: {', '.join(healthy)})" in message
    remove_placement_group(held)
    run.until_training(2)
    assert [name.rpartition("/")[2] for name in slice_groups()] == ["slice-2"]
    run.finish()


def look_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray says of free resources lags behind: from here on it is as if nobody held anything."""
    monkeypatch.setattr(ray_cluster, "available", lambda: {n.id: dict(n.total) for n in ray_cluster.nodes()})


def hold(nodes: list[str], chips: int) -> PlacementGroup:
    """Somebody else's reservation."""
    labels = [{"ray.io/node-id": node} for node in nodes]
    held = placement_group([{"TPU": chips}] * len(nodes), bundle_label_selector=labels)
    assert held.wait(LIMIT_S)
    return held


def test_a_reservation_that_can_not_be_met_is_retried_until_it_can_and_leaves_nothing_in_between(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster.add_slice("slice-0")
    held = hold(nodes[1:], 4)
    look_away(monkeypatch)
    run = Running(tmp_path, elastic_steps, 2, deadlines=Deadlines(reserve_s=60.0, backoff_first_s=0.5))
    wait_for(lambda: reservations_that_failed(run), "a failed reservation")
    wait_for(lambda: not slice_groups(), "that it was given back")
    remove_placement_group(held)
    run.until_training(2)
    run.finish()
    assert len(run.records(GroupStarted)) == 1


def test_growth_that_can_not_be_reserved_leaves_the_training_alone(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add_lone_host("slice-0")
    held = hold([cluster.add_lone_host("slice-1")], 8)
    run = Running(tmp_path, elastic_steps, (1, 2), scaling=LONE, deadlines=Deadlines(reserve_s=60.0))
    run.until_training(1)
    look_away(monkeypatch)
    wait_for(lambda: any("slice-1" in name for name in slice_groups()), "an attempt")
    wait_for(lambda: not any("slice-1" in name for name in slice_groups()), "its end")
    run.until_steps(20)
    assert len(run.records(GroupStarted)) == 1
    remove_placement_group(held)
    run.until_training(2)
    run.finish()
    assert [r.steps_lost for r in run.records(Recovered) if r.rung is Rung.PLANNED] == [0]


def fail_once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: Exception) -> threading.Event:
    """The next call of it raises. Set once it has."""
    real, failed = getattr(where, name), threading.Event()

    def call(*args: Any, **kwargs: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, call)
    return failed


def test_an_error_that_nobody_expects_while_reserving_is_named_and_leaves_nothing_behind(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add_lone_host("slice-0")
    fail_once(monkeypatch, PlacementGroup, "wait", OSError("too many open files"))
    run = Running(tmp_path, elastic_steps, 1, scaling=LONE, deadlines=Deadlines(backoff_first_s=0.5))
    run.until_training(1)
    assert len(slice_groups()) == 1, "what the first try had made is given back"
    run.finish()
    [failed] = reservations_that_failed(run)
    assert failed.failure.message.endswith("OSError: too many open files")


def test_a_look_at_the_cluster_that_fails_is_said_and_does_not_end_the_looking(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.add_lone_host("slice-0")
    run = Running(tmp_path, elastic_steps, (1, 2), scaling=LONE)
    run.until_training(1)
    error = RuntimeError("the control store is away")
    failed = fail_once(monkeypatch, capacity, "read_cluster", error)
    wait_for(failed.is_set, "a failed look")
    node = cluster.add_lone_host("slice-1")
    epoch = run.until_training(2)
    cluster.drain(node, 60.0)
    wait_for(lambda: run.records(PreemptionSeen), "the notice")
    run.until_training(1, epoch)
    run.finish()
    said = "".join(capfd.readouterr())
    assert "looking at the cluster failed (RuntimeError: the control store is away)" in said
    assert "looking at the cluster works again" in said


def test_two_runs_ask_for_capacity_side_by_side_and_withdraw_it_at_the_end(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_lone_host("slice-0")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one = Running(folders[0], elastic_steps, (1, 2), scaling=LONE)
    one.until_training(1)
    wait_for(lambda: len(demands()) == 1, "what it still wants")
    two = Running(folders[1], elastic_steps, 1, scaling=LONE)
    wait_for(lambda: len(demands()) == 2, "what the other wants, too")
    one.finish()
    two.until_training(1)
    wait_for(lambda: not demands(), "that nothing is wanted any more")
    two.finish()


def test_a_topology_that_no_tpu_has_is_refused_before_anything_is_asked_of_ray(
    cluster: RayCluster, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="topology is '3x5', expected one of v6e's: 1x1, 2x2, 2x4"):
        Running(tmp_path, elastic_steps, 2, scaling={**SCALING, "topology": "3x5"})
    assert everstep_groups() == {}
    assert not (tmp_path / "runs").exists()
