"""Nodes that are about to go: a slice there is told, and replaced, ahead of Kubernetes' own patience."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.kube.conditions import stamp
from everstep.kube.nodes import NOT_READY_S, node_view, notable, on_nodes
from everstep.testing.kube import ApiServer
from kube.live import MERGE, Namespace, operating
from kube.test_slices import cluster
from kube.world import World, group, manifest


def node(name: str = "n", taint: str = "", ready: str = "True", since: float = 0.0, **labels: str) -> Any:
    taints = [{"key": taint, "effect": "NoSchedule"}] if taint else []
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": stamp(since)}
    meta = {"name": name, "labels": labels, "resourceVersion": "1"}
    return {"metadata": meta, "spec": {"taints": taints}, "status": {"conditions": [condition]}}


@pytest.mark.parametrize(
    ("found", "going", "gone"),
    [
        (node(), "", False),
        (node(taint="example.com/whatever"), "", False),
        (node(taint="cloud.google.com/impending-node-termination"), "about to be terminated", False),
        (node(**{"cloud.google.com/active-node-maintenance": "ONGOING"}), "maintenance", False),
        (node(taint="karpenter.sh/disrupted"), "Karpenter", False),
        (node(taint="node.kubernetes.io/out-of-service"), "out of service", True),
    ],
)
def test_what_a_node_says_of_its_end(found: Any, going: str, gone: bool) -> None:
    seen = node_view(found)
    assert going in seen.going
    assert bool(seen.going) is bool(going)
    assert seen.gone is gone


def test_a_node_that_is_silent_for_a_moment_costs_nothing_and_one_that_stays_so_its_slice() -> None:
    world = World(manifest(group(replicas=2, hosts=2)))
    world.settle()
    [pod, *_] = world.replica(1)
    world.change(pod.name, node="n")
    nodes = notable([node_view(node(ready="Unknown", since=world.now))])
    pods, look_at = on_nodes(world.pods.values(), nodes, world.now + 1)
    assert look_at == world.now + NOT_READY_S
    assert not any(p.node_lost for p in pods)
    pods, look_at = on_nodes(world.pods.values(), nodes, world.now + NOT_READY_S)
    assert [p.name for p in pods if p.node_lost] == [pod.name]
    assert look_at is None


def test_a_pod_that_is_to_be_disrupted_takes_its_slice_along() -> None:
    world = World(manifest(group(replicas=2, hosts=2)))
    world.settle()
    world.change(world.replica(0)[1].name, going="it is about to be disrupted: PreemptionByScheduler")
    world.step()
    assert all(p.leaving is not None for p in world.replica(0))
    assert all(p.leaving is None for p in world.replica(1))


def test_a_head_leaves_its_node_early_only_where_that_costs_no_worker() -> None:
    for options in ({}, {"gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}}):
        world = World(manifest(group(replicas=1, hosts=2), **options))
        world.settle()
        head = next(p for p in world.pods.values() if p.node_type == "head")
        world.change(head.name, going="its node n is about to be terminated")
        world.step()
        assert (world.pods[head.name].leaving is not None) is bool(options)


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


@pytest.fixture
def nodes(space: Namespace) -> Iterator[list[str]]:
    names = [f"{space.name}-node-{i}" for i in range(4)]
    for name in names:
        space.server.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
    try:
        yield names
    finally:
        for name in names:
            space.server.request("DELETE", f"/api/v1/nodes/{name}")


def run_two_slices(space: Namespace, nodes: list[str]) -> None:
    """Two of two hosts each, one on each of these nodes."""
    space.create(cluster(group(replicas=2, hosts=2)))
    space.see(lambda: len(space.workers()) == 4, "two slices")
    for pod, name in zip(space.workers(), nodes, strict=True):
        space.bind(pod, name)
    space.run(*space.pods())


def test_a_slice_leaves_before_its_pod_is_disrupted_or_its_node_maintained(
    space: Namespace, nodes: list[str], tmp_path: Path
) -> None:
    with operating(space.server, tmp_path, "--namespace", space.name):
        run_two_slices(space, nodes)
        # As the scheduler says it of a Pod that has to make room, and the eviction API of one that it evicts.
        gone, kept = space.uids(index=0), space.uids(index=1)
        disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        ready = {"type": "Ready", "status": "True"}
        space.say(space.workers(index=0)[1], conditions=[ready, disrupted])
        space.see(lambda: space.anew(4, gone), "slice 0 anew", kubelet=True)
        assert kept < space.uids()
        # As GKE says it of a node.
        gone, kept = space.uids(index=1), space.uids(index=0)
        label = {"cloud.google.com/active-node-maintenance": "ONGOING"}
        space.server.request("PATCH", f"/api/v1/nodes/{nodes[2]}", {"metadata": {"labels": label}}, MERGE)
        space.see(lambda: space.anew(4, gone), "slice 1 anew", kubelet=True)
        assert kept < space.uids()
        events = space.events()
        assert "PreemptionByScheduler" in events
        assert "has maintenance" in events


def test_slices_leave_nodes_that_are_about_to_go(space: Namespace, nodes: list[str], tmp_path: Path) -> None:
    def change(name: str, what: dict[str, Any], sub: str = "") -> None:
        space.server.request("PATCH", f"/api/v1/nodes/{name}{sub}", what, MERGE)

    with operating(space.server, tmp_path, "--namespace", space.name):
        run_two_slices(space, nodes)
        space.see(lambda: space.status().get("slices") == "2/2", "both ready")
        # It says that it will be terminated: its slice goes whole, and comes back elsewhere.
        gone, kept = space.uids(index=0), space.uids(index=1)
        key = "cloud.google.com/impending-node-termination"
        change(nodes[1], {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}})
        space.see(lambda: space.anew(4, gone), "slice 0 anew", kubelet=True)
        assert kept < space.uids()
        assert "about to be terminated" in space.events()
        # Another one has not been heard of for too long: its Pod can't be waited for.
        since = stamp(time.time() - NOT_READY_S - 1)
        silent = {"type": "Ready", "status": "Unknown", "lastTransitionTime": since}
        change(nodes[2], {"status": {"conditions": [silent]}}, "/status")
        space.see(lambda: {i for i, _ in space.places()} == {0, 2}, "slice 1 under another index")
