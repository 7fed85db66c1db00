"""What a cluster's status says, and what it remembers for the operator."""

from __future__ import annotations

import json
from typing import Any

from everstep.kube import status
from everstep.kube.backoff import STEADY_S, ApiRefusal, ReplicaFailure
from everstep.kube.reconcile import Observed
from kube.world import World, group, manifest


def described(world: World, before: dict[str, Any] | None = None) -> dict[str, Any]:
    seen = Observed(
        pods=list(world.pods.values()),
        services=dict(world.services),
        refusals=world.refusals,
        failures=world.failures,
    )
    return status.describe(world.cluster, seen, [], before or {}, world.now)


def condition(said: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in said["conditions"] if c["type"] == kind), {})


def settled(*groups: dict[str, Any], **spec: Any) -> World:
    world = World(manifest(*(groups or (group(),)), **spec))
    world.settle()
    return world


def test_the_same_facts_are_the_same_status() -> None:
    world = settled()
    first = described(world)
    world.now += 5
    assert described(world, first) == first


def test_replicas_that_are_not_ready_are_listed_with_why_and_since_when() -> None:
    world = settled()
    first = described(world)
    assert (first["slices"], first["state"]) == ("3/3", "ready")
    broken = world.replica(1)[2]
    world.change(broken.name, broken="Failed: Evicted")
    second = described(world, first)
    assert (second["slices"], second["state"]) == ("2/3", "ready"), "as KubeRay's"
    assert condition(second, "Degraded")["message"] == "tpu: 2 of 3 replicas"
    [listed] = second["groups"][0]["replicas"]
    assert (listed["index"], listed["state"]) == (1, "Degraded")
    assert listed["reason"] == f"{broken.name}: Failed: Evicted"
    world.now += 60
    assert described(world, second)["groups"][0]["replicas"][0]["since"] == listed["since"]


def test_one_groups_surplus_doesnt_make_up_for_anothers_lack() -> None:
    world = settled(group("a", 2, 1), group("b", 1, 2), enableInTreeAutoscaling=True)
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 1
    world.change(world.replica(0, "b")[0].name, ready=False)
    said = described(world, {"state": "ready"})
    assert said["slices"] == "2/2"
    assert condition(said, "Degraded")["status"] == "True"


def test_pods_of_an_earlier_cluster_of_this_name_dont_count() -> None:
    world = settled()
    for name in list(world.pods):
        world.change(name, owner="another")
    said = described(world)
    assert (said["slices"], said["readyWorkerReplicas"], said["head"]["podName"]) == ("0/3", 0, "")


def test_pods_that_nobody_owns_are_named() -> None:
    world = settled()
    orphan = world.workers[0].name
    world.change(orphan, owner=None)
    said = described(world)
    assert orphan in condition(said, "OrphanedPods")["message"]
    del world.pods[orphan]
    assert condition(described(world, said), "OrphanedPods")["status"] == "False"


def test_a_head_from_before_the_autoscaler_was_turned_on_or_off_is_named() -> None:
    world = settled()
    assert not condition(described(world), "HeadOutdated")
    world.raw["spec"]["enableInTreeAutoscaling"] = True
    said = described(world)
    assert "was made without the autoscaler" in condition(said, "HeadOutdated")["message"]
    [head] = [p for p in world.pods.values() if p.node_type == "head"]
    del world.pods[head.name]
    world.settle()
    assert condition(described(world, said), "HeadOutdated")["status"] == "False"


def test_failures_and_refusals_are_remembered_for_the_next_operator() -> None:
    world = settled()
    for _ in range(2):
        world.change(world.replica(1)[0].name, restarts=1)
        world.settle()
        world.now += 20
        world.settle()
    world.refusals = {
        name: ApiRefusal(reason="Refused", message="no", attempts=2, at=world.now, generation=1)
        for name in ("Group/tpu", "Head", "Service/demo-head-svc")
    }
    said = described(world)
    assert condition(said, "ReplicaFailure")["status"] == "True"
    assert "replica 1 has failed 2 times" in condition(said, "ReplicaFailure")["message"]
    assert status.failures(said) == world.failures
    assert status.refusals(said) == world.refusals
    world.refusals = {}
    world.now += STEADY_S
    later = described(world, said)
    assert condition(later, "ReplicaFailure")["status"] == "False"
    assert "failing" not in later


def test_a_status_of_thousands_of_failures_can_be_written() -> None:
    """The API server takes objects of up to 1.5 MiB, and the spec has to fit in, too."""
    world = World(manifest(group(replicas=5000, hosts=1, maxReplicas=5000)))
    world.failures = {
        ("tpu", index): ReplicaFailure(
            group="tpu",
            index=index,
            replica=f"tpu-{index:05}",
            reason="Failed: " + "why " * 100,
            attempts=index,
            at=world.now - 5000 + index,
            generation=1,
        )
        for index in range(5000)
    }
    world.now -= 4500
    said = described(world)
    assert len(json.dumps(said)) < 512 * 1024
    assert max(entry["attempts"] for entry in said["failing"]) == 4999, "the newest are kept"
