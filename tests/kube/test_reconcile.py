"""The operator's brain, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.kube.actions import CreateHead, CreateReplica, CreateService, DeletePod, LabelPod
from everstep.kube.backoff import STEADY_S, ApiRefusal, of_growth, of_pod, of_replica, of_service
from everstep.kube.replicas import PATIENCE_S
from kube.world import GRACE_S, UID, World, group, manifest, template


def settled(*groups: dict[str, Any], **spec: Any) -> World:
    world = World(manifest(*(groups or (group(),)), **spec))
    world.settle()
    return world


def uids(world: World) -> set[str]:
    return {pod.uid for pod in world.workers}


def test_a_group_is_made_whole_with_indices_from_zero() -> None:
    world = settled()
    assert [(p.index, p.host) for p in world.workers] == [(i, h) for i in range(3) for h in range(4)]
    assert len({p.replica for p in world.workers}) == 3
    assert len({p.name for p in world.pods.values()}) == 13
    assert set(world.services) == {"demo-head-svc", "demo-headless"}


def test_nothing_to_do_is_nothing_done() -> None:
    world = settled()
    assert world.plan().actions == ()


@pytest.mark.parametrize(
    "trouble",
    [
        {"broken": "Failed: Evicted"},
        {"restarts": 1},
        {"node_lost": True},
        {"leaving": 1030.0},
    ],
)
def test_one_bad_pod_takes_its_replica_along_and_no_other(trouble: dict[str, Any]) -> None:
    world = settled()
    others = {p.uid for p in world.workers if p.index != 1}
    world.change(world.replica(1)[2].name, **trouble)
    deleted = {a.name for a in world.step().actions if isinstance(a, DeletePod)}
    assert deleted == {p.name for p in world.replica(1)} - (
        {world.replica(1)[2].name} if "leaving" in trouble else set()
    )
    world.settle()
    assert others < uids(world)
    assert world.indices() == [0, 1, 2]
    assert len(world.workers) == 12


def test_a_missing_pod_takes_its_replica_along() -> None:
    world = settled()
    gone = world.replica(2)[0]
    others = {p.uid for p in world.workers if p.index != 2}
    del world.pods[gone.name]
    assert len([a for a in world.plan().actions if isinstance(a, DeletePod)]) == 3
    world.settle()
    assert others < uids(world)
    assert not uids(world) & {gone.uid}


def test_a_restarted_container_of_a_lone_host_is_left_alone() -> None:
    world = settled(group(hosts=1))
    world.change(world.workers[0].name, restarts=3)
    assert world.plan().actions == ()


def test_a_restarted_container_is_left_alone_where_the_spec_says_so() -> None:
    easy = template()
    easy["metadata"] = {"annotations": {"everstep.dev/restart-policy": "Container"}}
    world = settled(group(template=easy))
    world.change(world.workers[0].name, restarts=3)
    assert world.plan().actions == ()


def test_an_index_is_used_again_once_its_pods_are_gone_and_not_before() -> None:
    world = settled()
    stuck = world.replica(1)[0]
    world.change(stuck.name, broken="Failed")
    world.step()
    assert not [a for a in world.plan().actions if isinstance(a, CreateReplica)]
    world.kubelets(hanging=frozenset({stuck.name}))
    assert not [a for a in world.plan().actions if isinstance(a, CreateReplica)], "it may still go"
    world.kubelets()
    assert [a.index for a in world.plan().actions if isinstance(a, CreateReplica)] == [1]


def test_a_pod_that_hangs_past_its_grace_costs_an_index_and_not_the_group() -> None:
    world = settled()
    stuck = world.replica(0)[3]
    world.delete(stuck.name)
    world.step()
    world.kubelets(hanging=frozenset({stuck.name}))
    wake = world.plan().wake_at
    assert wake is not None
    assert wake > world.now
    world.now = wake
    assert wake >= 1000 + GRACE_S + PATIENCE_S
    made = [a for a in world.step().actions if isinstance(a, CreateReplica)]
    assert [a.index for a in made] == [3]
    world.kubelets(hanging=frozenset({stuck.name}))
    assert world.plan().actions == ()
    # Once it is gone its index is free, and is used when one is needed.
    world.kubelets()
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 4
    assert [a.index for a in world.plan().actions if isinstance(a, CreateReplica)] == [0]


def test_a_pod_on_a_lost_node_is_not_waited_for() -> None:
    world = settled()
    lost = world.replica(0)[0]
    world.change(lost.name, node_lost=True)
    world.step()
    world.kubelets(hanging=frozenset({lost.name}))
    assert [a.index for a in world.plan().actions if isinstance(a, CreateReplica)] == [3]


def test_scaling_down_takes_what_is_not_ready_first_and_then_the_highest() -> None:
    world = settled()
    world.change(world.replica(0)[1].name, ready=False)
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 1
    world.settle()
    assert world.indices() == [1]


def test_holes_are_filled_again() -> None:
    world = settled()
    world.raw["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {
        "workersToDelete": [world.replica(0)[2].name]
    }
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 2
    world.settle()
    assert world.indices() == [1, 2]
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 3
    world.settle()
    assert world.indices() == [0, 1, 2]


def test_a_stale_name_in_workers_to_delete_hits_nobody() -> None:
    world = settled()
    named = [p.name for p in world.replica(1)]
    world.raw["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {"workersToDelete": named}
    world.settle()
    assert world.indices() == [0, 1, 2], "replicas decides what comes back"
    assert world.plan().actions == ()
    assert not {p.name for p in world.workers} & set(named)


def test_with_the_autoscaler_on_only_what_it_names_is_deleted() -> None:
    world = settled(enableInTreeAutoscaling=True)
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 1
    assert world.plan().actions == ()
    world.raw["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {
        "workersToDelete": [p.name for i in (0, 2) for p in world.replica(i)]
    }
    world.settle()
    assert world.indices() == [1]


def test_replicas_stay_within_their_limits() -> None:
    world = settled(group(replicas=9, maxReplicas=2))
    assert world.indices() == [0, 1]
    world.raw["spec"]["workerGroupSpecs"][0].update(replicas=0, minReplicas=1)
    world.settle()
    assert world.indices() == [0]


def test_another_number_of_hosts_replaces_replicas_one_at_a_time() -> None:
    world = settled()
    world.raw["spec"]["workerGroupSpecs"][0]["numOfHosts"] = 2
    fewest = 3
    for _ in range(20):
        world.step()
        whole = {
            i
            for i in world.indices()
            if all(p.ready and p.leaving is None for p in world.replica(i))
            and len(world.replica(i)) in (2, 4)
        }
        fewest = min(fewest, len(whole))
        world.kubelets()
    assert fewest == 2, "never more than one was away"
    assert [(p.index, p.host) for p in world.workers] == [(i, h) for i in range(3) for h in range(2)]


def test_replicas_of_another_size_that_do_nothing_yet_go_at_once() -> None:
    world = World(manifest(group()))
    world.step()
    world.raw["spec"]["workerGroupSpecs"][0]["numOfHosts"] = 2
    assert len([a for a in world.plan().actions if isinstance(a, DeletePod)]) == 12


def test_a_removed_group_leaves_nothing_behind() -> None:
    world = settled(group(), group("other", 1, 2))
    kept = {p.uid for p in world.workers if p.group == "tpu"}
    del world.raw["spec"]["workerGroupSpecs"][1]
    world.settle()
    assert uids(world) == kept


def test_a_suspended_cluster_has_no_pods_and_comes_back() -> None:
    world = settled()
    world.raw["spec"]["suspend"] = True
    world.settle()
    assert world.pods == {}
    world.raw["spec"]["suspend"] = False
    world.settle()
    assert len(world.pods) == 13


def test_a_suspended_group_has_no_pods_and_the_others_keep_theirs() -> None:
    world = settled(group(), group("other", 1, 2))
    kept = {p.uid for p in world.workers if p.group == "other"}
    world.raw["spec"]["workerGroupSpecs"][0]["suspend"] = True
    world.settle()
    assert uids(world) == kept
    world.raw["spec"]["workerGroupSpecs"][0]["suspend"] = False
    world.settle()
    assert len(world.workers) == 14


def test_two_broken_replicas_in_two_groups_are_replaced_together() -> None:
    world = settled(group(), group("other", 2, 2))
    world.change(world.replica(0)[0].name, broken="Failed")
    world.change(world.replica(1, "other")[0].name, broken="Failed")
    assert len([a for a in world.plan().actions if isinstance(a, DeletePod)]) == 6


def test_a_dead_head_is_replaced_and_there_are_never_two() -> None:
    world = settled()
    head = next(p for p in world.pods.values() if p.node_type == "head")
    world.change(head.name, broken="Failed")
    world.step()
    assert not [a for a in world.plan().actions if isinstance(a, CreateHead)]
    world.kubelets()
    assert len([a for a in world.step().actions if isinstance(a, CreateHead)]) == 1


def test_what_was_refused_is_tried_again_later_and_at_once_when_the_spec_changes() -> None:
    world = settled()
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 4
    world.refusals[of_growth("tpu")] = ApiRefusal(
        reason="QuotaExceeded", message="exceeded quota", attempts=2, at=world.now, generation=1, growth=True
    )
    plan = world.plan()
    assert plan.actions == ()
    assert plan.wake_at == world.now + 60
    world.raw["metadata"]["generation"] = 2
    assert [a.index for a in world.plan().actions if isinstance(a, CreateReplica)] == [3]


def unlabelled(world: World, name: str, **fields: Any) -> None:
    made = {
        "metadata": {
            "name": name,
            "labels": {"ray.io/cluster": "demo", "ray.io/node-type": "worker", "ray.io/group": "tpu"},
            "ownerReferences": [{"kind": "RayCluster", "uid": UID}],
        },
        "spec": template()["spec"],
    }
    world.add(made)
    world.change(name, scheduled=True, ready=True, **fields)


def test_pods_from_before_are_taken_in_where_each_is_a_replica() -> None:
    world = World(manifest(group(replicas=3, hosts=1)))
    unlabelled(world, "old-1")
    unlabelled(world, "old-2")
    plan = world.step()
    assert {a.name for a in plan.actions if isinstance(a, LabelPod)} == {"old-1", "old-2"}
    assert [a.index for a in plan.actions if isinstance(a, CreateReplica)] == [2]
    world.settle()
    assert world.indices() == [0, 1, 2]
    assert {"old-1", "old-2"} < set(world.pods)


def test_hosts_from_before_are_taken_in_by_what_gkes_webhook_wrote() -> None:
    world = World(manifest(group(replicas=2, hosts=2)))
    for host in range(2):
        unlabelled(world, f"old-{host}", hint=("tpu-1", host))
    plan = world.plan()
    # The operator is killed after the first label: the next life ends what was begun.
    world.carry_out(type(plan)(tuple(a for a in plan.actions if isinstance(a, LabelPod))[:1], None))
    world.settle()
    assert [(p.index, p.host) for p in world.workers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {p.replica for p in world.replica(1)} == {world.pods["old-0"].replica}


def test_hosts_that_cant_be_told_apart_are_counted_and_not_duplicated() -> None:
    world = World(manifest(group(replicas=2, hosts=4)))
    for host in range(4):
        unlabelled(world, f"old-{host}")
    plan = world.step()
    assert not [a for a in plan.actions if isinstance(a, (DeletePod, LabelPod))]
    assert len([a for a in plan.actions if isinstance(a, CreateReplica)]) == 1


def test_pods_of_an_earlier_cluster_of_this_name_are_not_ours_and_their_index_is_not_used() -> None:
    world = settled(group(replicas=1))
    for pod in world.replica(0):
        world.change(pod.name, owner="another")
    assert [a.index for a in world.plan().actions if isinstance(a, CreateReplica)] == [1]
    assert not [a for a in world.plan().actions if isinstance(a, DeletePod)]


def test_a_replica_that_fails_again_and_again_is_made_anew_later_and_later_and_holds_up_no_other() -> None:
    world = settled()
    waits = []
    for _ in range(8):
        world.change(world.replica(1)[0].name, restarts=1)
        world.step()
        failed = world.now
        world.kubelets()
        plan = world.plan()
        while not [a for a in plan.actions if isinstance(a, CreateReplica)]:
            assert plan.wake_at is not None
            world.now = plan.wake_at
            plan = world.plan()
        waits.append(round(world.now - failed))
        assert [a.index for a in plan.actions if isinstance(a, CreateReplica)] == [1]
        world.carry_out(plan)
        world.kubelets()
    assert waits == [1, 10, 20, 40, 80, 160, 300, 300]

    # While it waits, another one that fails, and one that is wanted in addition, come at once.
    world.change(world.replica(1)[0].name, restarts=1)
    world.change(world.replica(0)[0].name, restarts=1)
    world.step()
    world.kubelets()
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 4
    assert [a.index for a in world.step().actions if isinstance(a, CreateReplica)] == [0, 3]
    world.settle()
    assert world.indices() == [0, 2, 3]
    # A change of the spec is a reason to try at once.
    world.raw["metadata"]["generation"] += 1
    assert [a.index for a in world.plan().actions if isinstance(a, CreateReplica)] == [1]


def test_a_replica_that_ran_for_long_is_replaced_at_once_whatever_was_before() -> None:
    world = settled()
    for _ in range(4):
        world.change(world.replica(1)[0].name, broken="Failed")
        world.step()
        world.kubelets()
        assert [a.index for a in world.step().actions if isinstance(a, CreateReplica)] == [1]
        world.kubelets()
        world.now += STEADY_S


def test_what_others_did_to_a_replica_is_not_its_failure() -> None:
    world = settled()
    for _ in range(4):
        world.delete(world.replica(1)[0].name)
        world.step()
        world.kubelets()
        assert [a.index for a in world.step().actions if isinstance(a, CreateReplica)] == [1]
        world.kubelets()
    assert world.failures == {}


def test_a_head_that_fails_again_and_again_waits_too() -> None:
    world = settled()
    for expected in (True, False):
        [head] = [p for p in world.pods.values() if p.node_type == "head"]
        world.change(head.name, broken="Failed: Error, exit code 1")
        world.step()
        world.kubelets()
        made = [a for a in world.step().actions if isinstance(a, CreateHead)]
        assert bool(made) is expected
        world.kubelets()
    wake = world.plan().wake_at
    assert wake is not None
    world.now = wake
    assert [a for a in world.plan().actions if isinstance(a, CreateHead)]


def test_a_head_waits_for_that_of_an_earlier_cluster_of_its_name() -> None:
    world = settled()
    [head] = [p for p in world.pods.values() if p.node_type == "head"]
    world.change(head.name, owner="another")
    assert not [a for a in world.plan().actions if isinstance(a, (CreateHead, DeletePod))]
    world.delete(head.name)
    assert not [a for a in world.plan().actions if isinstance(a, CreateHead)]
    world.kubelets()
    assert [a for a in world.plan().actions if isinstance(a, CreateHead)]


def test_pods_whose_replica_cant_be_told_go_when_they_are_named_and_when_none_are_wanted() -> None:
    world = World(manifest(group(replicas=1, hosts=4)))
    for host in range(4):
        unlabelled(world, f"old-{host}")
    world.raw["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {"workersToDelete": ["old-2"]}
    assert [a.name for a in world.plan().actions if isinstance(a, DeletePod)] == ["old-2"]
    world.raw["spec"]["workerGroupSpecs"][0].update(scaleStrategy={}, replicas=0)
    assert len([a for a in world.plan().actions if isinstance(a, DeletePod)]) == 4
    world.raw["spec"]["enableInTreeAutoscaling"] = True
    assert not [a for a in world.plan().actions if isinstance(a, DeletePod)]


def test_a_service_that_was_refused_is_tried_again_later() -> None:
    world = settled()
    del world.services["demo-head-svc"]
    world.refusals[of_service("demo-head-svc")] = ApiRefusal(
        reason="PodsRefused", message="invalid", attempts=1, at=world.now, generation=1
    )
    assert world.plan().actions == ()
    world.raw["metadata"]["generation"] = 2
    assert len([a for a in world.plan().actions if isinstance(a, CreateService)]) == 1


def test_a_place_that_was_taken_is_filled_though_the_group_may_not_grow() -> None:
    world = settled()
    world.raw["spec"]["workerGroupSpecs"][0]["replicas"] = 4
    refused = ApiRefusal(
        reason="QuotaExceeded", message="no", attempts=3, at=world.now, generation=1, growth=True
    )
    world.refusals[of_growth("tpu")] = refused
    for pod in world.replica(1):
        del world.pods[pod.name]
    world.vacated.add(("tpu", 1))
    made = [a for a in world.plan().actions if isinstance(a, CreateReplica)]
    assert [(a.index, a.heals) for a in made] == [(1, True)]
    # Refused itself, it waits for itself; then it comes before what grows.
    world.refusals[of_replica("tpu", 1)] = ApiRefusal(
        reason="QuotaExceeded", message="no", attempts=1, at=world.now, generation=1
    )
    assert not [a for a in world.plan().actions if isinstance(a, CreateReplica)]
    world.now = refused.retry_at
    assert [a.index for a in world.plan().actions if isinstance(a, CreateReplica)] == [1, 3]


def test_a_pod_that_cant_be_deleted_costs_an_index_and_no_other_pod() -> None:
    world = settled()
    stays = world.replica(1)[0]
    world.change(stays.name, broken="Failed")
    world.step()
    world.pods[stays.name] = stays
    world.change(stays.name, broken="Failed")
    world.refusals[of_pod(stays.name)] = ApiRefusal(
        reason="Refused", message="no", attempts=3, at=world.now, generation=1
    )
    world.kubelets()
    world.change(stays.name, leaving=None)
    plan = world.plan()
    assert [a.index for a in plan.actions if isinstance(a, CreateReplica)] == [3]
    assert not [a for a in plan.actions if isinstance(a, DeletePod)], "it isn't its turn yet"
    assert plan.wake_at is not None
    world.now += 4
    assert [a.name for a in world.plan().actions if isinstance(a, DeletePod)] == [stays.name]
