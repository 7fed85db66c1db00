"""A gang per slice: all of its hosts get a node, or none does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from everstep.kube import gangs
from everstep.kube.actions import CreateReplica, DeletePod
from everstep.kube.reconcile import HALF_BOUND_S
from everstep.kube.spec import parse
from everstep.testing.kube import ApiServer
from kube.live import Namespace, install, operating
from kube.test_slices import cluster
from kube.world import World, group, manifest

API = {gang.name: gang.api or "" for gang in gangs.GANGS}
PLUGINS, VOLCANO, KAI = API["scheduler-plugins"], API["volcano"], API["kai-scheduler"]
ALL = frozenset({PLUGINS, VOLCANO, KAI})


def chosen(served: frozenset[str], scheduler: str | None = None, **meta: dict[str, str]) -> str | None:
    raw = manifest(group())
    raw["metadata"].update(meta)
    if scheduler:
        raw["spec"]["workerGroupSpecs"][0]["template"]["spec"]["schedulerName"] = scheduler
    gang = gangs.choose(parse(raw), served)
    return gang.name if gang else None


def test_a_scheduler_is_found_by_what_is_installed_and_asked_for() -> None:
    assert chosen(frozenset()) is None
    assert chosen(frozenset({PLUGINS})) == "scheduler-plugins"
    assert chosen(frozenset({VOLCANO})) is None, "nobody has asked for another scheduler"
    assert chosen(ALL, labels={"ray.io/scheduler-name": "volcano"}) == "volcano"
    assert chosen(ALL, "kai-scheduler") == "kai-scheduler"
    assert chosen(frozenset({PLUGINS}), labels={"ray.io/scheduler-name": "volcano"}) is None
    assert chosen(ALL, annotations={"everstep.dev/gang": "off"}) is None
    assert chosen(frozenset({API["kubernetes"], PLUGINS})) == "kubernetes"
    assert chosen(frozenset(), labels={"ray.io/scheduler-name": "yunikorn"}) == "yunikorn"


def test_each_schedulers_pods_are_marked_as_it_wants_it() -> None:
    asked = {"limits": {"cpu": "2", "memory": "1Gi"}}
    raw = manifest(group())
    raw["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"] = asked
    raw["metadata"]["labels"] = {"volcano.sh/queue-name": "mine", "kai.scheduler/queue": "theirs"}
    made = parse(raw)
    marks = {}
    for gang in gangs.GANGS:
        action = CreateReplica("tpu", 2, "tpu-abcde", ("a", "b", "c", "d"), gang=gang)
        marks[gang.name] = (action.manifests(made)[0], action.pod_group(made) or {})
    for name in ("scheduler-plugins", "volcano", "kai-scheduler"):
        assert marks[name][1]["metadata"]["name"] == "demo-tpu-2"
        assert marks[name][1]["spec"]["minMember"] == 4
    pod, _ = marks["scheduler-plugins"]
    assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "demo-tpu-2"
    assert "schedulerName" not in pod["spec"]
    pod, pod_group = marks["volcano"]
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "demo-tpu-2"
    assert (pod["spec"]["schedulerName"], pod_group["spec"]["queue"]) == ("volcano", "mine")
    pod, pod_group = marks["kai-scheduler"]
    assert pod["metadata"]["labels"]["kai.scheduler/queue"] == "theirs"
    assert pod_group["spec"]["queue"] == "theirs"
    pod, pod_group = marks["kubernetes"]
    assert pod["spec"]["schedulingGroup"] == {"podGroupName": "demo-tpu-2-of-4"}
    assert pod_group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 4}}}
    pod, pod_group = marks["yunikorn"]
    assert not pod_group
    assert (pod["metadata"]["labels"]["applicationId"], pod["spec"]["schedulerName"]) == (
        "demo-tpu-2",
        "yunikorn",
    )
    [task] = json.loads(pod["metadata"]["annotations"]["yunikorn.apache.org/task-groups"])
    assert (task["minMember"], task["minResource"]) == (4, {"cpu": "2", "memory": "1073741824"})


def half_bound() -> World:
    world = World(manifest(group(replicas=1)))
    world.step()
    for pod in world.workers[:2]:
        world.change(pod.name, scheduled=True)
    return world


def test_a_replica_that_holds_half_of_its_nodes_gives_them_back_after_a_while() -> None:
    world = half_bound()
    plan = world.plan()
    assert not [a for a in plan.actions if isinstance(a, DeletePod)]
    assert plan.wake_at == world.now + HALF_BOUND_S
    world.now += HALF_BOUND_S
    assert len([a for a in world.step().actions if isinstance(a, DeletePod)]) == 4
    assert "waited for a node" in world.failures["tpu", 0].reason, "it comes back later and later"


def test_where_there_is_a_gang_scheduler_that_is_its_business() -> None:
    world = half_bound()
    world.served = frozenset({PLUGINS})
    world.now += HALF_BOUND_S
    assert not [a for a in world.plan().actions if isinstance(a, DeletePod)]


def pod_groups() -> dict[str, Any]:
    """The definition of scheduler-plugins, as far as it matters here."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    approved = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "podgroups.scheduling.x-k8s.io", "annotations": approved},
        "spec": {
            "group": "scheduling.x-k8s.io",
            "scope": "Namespaced",
            "names": {"kind": "PodGroup", "plural": "podgroups"},
            "versions": [version],
        },
    }


def test_each_slice_has_a_pod_group_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    with ApiServer() as server:
        install(server)
        server.kubectl("apply", "-f", "-", stdin=json.dumps(pod_groups()))
        server.kubectl(
            "wait", "--for=condition=established", "crd/podgroups.scheduling.x-k8s.io", "--timeout=30s"
        )
        space = Namespace(server)

        def sizes() -> dict[str, int]:
            found = space.get("podgroups", group=f"/apis/{PLUGINS}")["items"]
            return {item["metadata"]["name"]: item["spec"]["minMember"] for item in found}

        with operating(server, tmp_path, "--namespace", space.name):
            space.create(cluster(group("tpu", 2, 2), group("alone", 1, 1)))
            space.see(lambda: len(space.workers()) == 5, "their Pods")
            assert sizes() == {"demo-tpu-0": 2, "demo-tpu-1": 2}, "a host alone needs none"
            for pod in space.workers(group="tpu"):
                index = pod["metadata"]["labels"]["ray.io/worker-group-replica-index"]
                assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == f"demo-tpu-{index}"
            space.see(lambda: space.status().get("gang") == "scheduler-plugins", "the status to name it")
            gone = space.uids(index=1)
            space.delete_pod(space.workers(group="tpu", index=1)[0])
            space.see(lambda: space.anew(5, gone), "one of them anew")
            # Another size is another gang, at the same place.
            space.patch_group(0, numOfHosts=3)
            space.see(lambda: sizes() == {"demo-tpu-0": 3, "demo-tpu-1": 3}, "gangs of three")
