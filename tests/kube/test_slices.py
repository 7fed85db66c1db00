"""Replicas that live and die as one, on a real API server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.testing.kube import ApiServer
from kube.live import Namespace, OperatorProcess, container, operating
from kube.world import group, manifest
from processes import wait_for

ALL = [(i, h) for i in range(3) for h in range(4)]


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


@pytest.fixture
def operator(space: Namespace, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operating(space.server, tmp_path, "--namespace", space.name) as running:
        yield running


def cluster(*groups: dict[str, Any], name: str = "demo", **spec: Any) -> dict[str, Any]:
    made = manifest(*(groups or (group(),)), name=name, **spec)
    made["metadata"] = {"name": name, "annotations": {"everstep.dev/managed": "true"}}
    return made


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {v["name"]: v.get("value", "") for v in pod["spec"]["containers"][0]["env"]}


def test_three_slices_of_four_hosts_and_one_that_is_replaced(
    space: Namespace, operator: OperatorProcess
) -> None:
    space.apply(cluster())
    space.see(lambda: space.places() == ALL, "3 replicas of 4 hosts")
    pods = space.workers()
    assert len({p["metadata"]["labels"]["ray.io/worker-group-replica-name"] for p in pods}) == 3
    for pod in pods:
        labels, env = pod["metadata"]["labels"], environment(pod)
        index, host = labels["ray.io/worker-group-replica-index"], labels["ray.io/replica-host-index"]
        assert pod["spec"]["hostname"] == f"tpu-{index}-{host}"
        assert pod["spec"]["subdomain"] == "demo-headless"
        assert env["TPU_WORKER_ID"] == host
        assert env["TPU_NAME"] == f"tpu-{index}"
        assert env["TPU_WORKER_HOSTNAMES"] == ",".join(f"tpu-{index}-{h}.demo-headless" for h in range(4))
        assert env["FQ_RAY_IP"] == f"demo-head-svc.{space.name}.svc.cluster.local"
        assert not any(name.startswith("MEGASCALE") for name in env)
    assert {s["metadata"]["name"] for s in space.get("services")["items"]} == {
        "demo-head-svc",
        "demo-headless",
    }
    space.run(*space.pods())
    space.see(lambda: space.status().get("slices") == "3/3", "the status to say so")
    assert "3/3" in space.server.kubectl("-n", space.name, "get", "rayclusters")

    # Somebody deletes one Pod.
    replica, others = space.uids(index=1), space.uids() - space.uids(index=1)
    space.delete_pod(space.workers(index=1)[2])
    space.see(lambda: space.anew(len(ALL), replica), "replica 1 anew", kubelet=True)
    assert others < space.uids()
    assert space.places() == ALL
    space.see(lambda: space.status()["slices"] == "2/3", "the status to say so")

    # One fails.
    space.run(*space.pods())
    replica, others = space.uids(index=0), space.uids() - space.uids(index=0)
    space.say(space.workers(index=0)[3], phase="Failed", reason="Evicted")
    space.see(lambda: space.anew(len(ALL), replica), "replica 0 anew", kubelet=True)
    assert others < space.uids()
    assert space.places() == ALL

    # A container of one was started again.
    space.run(*space.pods())
    replica, others = space.uids(index=2), space.uids() - space.uids(index=2)
    pod = space.workers(index=2)[0]
    space.say(pod, containerStatuses=[container(pod, restarts=1)])
    space.see(lambda: space.anew(len(ALL), replica), "replica 2 anew", kubelet=True)
    assert others < space.uids()
    assert space.places() == ALL
    events = space.events()
    assert "ReplicaReplaced" in events
    assert "no longer in step" in events


def test_what_the_autoscaler_names_goes_whole_and_replicas_decides_what_comes(
    space: Namespace, operator: OperatorProcess
) -> None:
    space.create(cluster())
    space.see(lambda: space.places() == ALL, "3 replicas of 4 hosts")
    named = space.workers(index=1)[0]["metadata"]["name"]
    kept = space.uids() - space.uids(index=1)
    space.patch_group(replicas=2, scaleStrategy={"workersToDelete": [named]})
    space.see(lambda: space.uids() == kept, "replica 1 to be gone")
    named = space.workers(index=2)[0]["metadata"]["name"]
    kept, gone = space.uids(index=0), space.uids(index=2)
    space.patch_group(scaleStrategy={"workersToDelete": [named]})
    space.see(lambda: space.anew(8, gone), "one for the one that went")
    assert kept < space.uids()
    assert space.cluster()["spec"]["workerGroupSpecs"][0]["replicas"] == 2


def test_scaling_is_by_whole_replicas_and_fills_holes(space: Namespace, operator: OperatorProcess) -> None:
    space.create(cluster())
    space.see(lambda: space.places() == ALL, "3 replicas")
    space.patch_group(replicas=1)
    space.see(lambda: space.places() == ALL[:4], "1 replica")
    space.patch_group(replicas=3)
    space.see(lambda: space.places() == ALL, "3 replicas again")


def test_a_pod_that_hangs_in_terminating_costs_an_index_and_not_the_group(
    space: Namespace, operator: OperatorProcess
) -> None:
    quick = group()
    quick["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    space.create(cluster(quick))
    space.see(lambda: space.places() == ALL, "3 replicas")
    space.run(*space.pods())
    stuck = space.workers(index=1)[0]
    path = f"/api/v1/namespaces/{space.name}/pods/{stuck['metadata']['name']}"
    space.server.request(
        "PATCH", path, {"metadata": {"finalizers": ["example.com/stuck"]}}, "application/merge-patch+json"
    )
    others = space.uids() - space.uids(index=1)
    space.delete_pod(stuck)
    expected = [(i, h) for i in (0, 2, 3) for h in range(4)]
    space.see(lambda: space.places() == expected, "a replica under another index", kubelet=True)
    assert others < space.uids()
    held = space.server.request("GET", path)
    assert held["metadata"]["deletionTimestamp"], "the stuck one is still there"
    # The group is alive: another failure is healed, and when the finalizer goes, so does the Pod.
    gone = space.uids(index=0)
    space.delete_pod(space.workers(index=0)[0])
    space.see(lambda: space.anew(len(expected), gone), "the next to be healed", kubelet=True)
    space.server.request("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
    space.see(lambda: len(space.get("pods")["items"]) == 13, "the stuck one to be gone", kubelet=True)


def test_a_lost_nodes_pods_are_not_waited_for(space: Namespace, operator: OperatorProcess) -> None:
    space.create(cluster())
    space.see(lambda: space.places() == ALL, "3 replicas")
    space.run(*space.pods())
    lost = space.workers(index=0)
    for pod in lost:
        space.say(pod, phase="Unknown", reason="NodeLost")
    expected = [(i, h) for i in (1, 2, 3) for h in range(4)]
    space.see(lambda: space.places() == expected, "a replica under another index")


def test_two_clusters_and_two_groups_are_healed_side_by_side(
    space: Namespace, operator: OperatorProcess
) -> None:
    for name in ("one", "two"):
        space.create(cluster(group("a", 2, 2), group("b", 2, 2), name=name))
    space.see(lambda: len(space.workers()) == 16, "2 clusters with 2 groups of 2 replicas of 2 hosts")
    space.run(*space.pods())
    broken = {
        p["metadata"]["uid"]
        for p in space.workers()
        if p["metadata"]["labels"]["ray.io/worker-group-replica-index"] == "1"
    }
    kept = space.uids() - broken
    for pod in space.workers(index=1, host=0):
        space.say(pod, phase="Failed")
    space.see(lambda: space.anew(16, broken), "all four anew", kubelet=True)
    assert kept < space.uids()


def test_quota_for_six_of_eight_pods_gives_one_whole_replica_and_quiet(
    space: Namespace, operator: OperatorProcess
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": "7"}},  # the head, and six workers
    }
    space.create(quota)
    # There is no quota controller here to count at first; it is told that there is nothing.
    space.server.request(
        "PATCH",
        f"/api/v1/namespaces/{space.name}/resourcequotas/pods/status",
        {"status": {"hard": {"pods": "7"}, "used": {"pods": "0"}}},
        "application/merge-patch+json",
    )
    space.create(cluster(group(replicas=2)))
    space.see(lambda: space.condition("ReplicaFailure").get("status") == "True", "a condition that says so")
    failure = space.condition("ReplicaFailure")
    assert failure["reason"] == "QuotaExceeded"
    assert "exceeded quota" in failure["message"]
    space.see(lambda: len(space.places()) == 4, "one replica, whole")
    assert len({i for i, _ in space.places()}) == 1
    assert "QuotaExceeded" in space.events()
    [refused] = space.status()["refused"]
    assert refused["name"] == "Group/tpu"


@pytest.mark.soak
def test_a_minute_under_a_quota_is_a_quiet_one(space: Namespace, operator: OperatorProcess) -> None:
    hard = {"pods": "7"}
    space.create(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods"}, "spec": {"hard": hard}}
    )
    path = f"/api/v1/namespaces/{space.name}/resourcequotas/pods/status"
    used = {"status": {"hard": hard, "used": {"pods": "0"}}}
    space.server.request("PATCH", path, used, "application/merge-patch+json")
    space.create(cluster(group(replicas=2)))
    space.see(lambda: space.condition("ReplicaFailure").get("status") == "True", "the refusal")
    before, began = len(space.server.calls()), time.monotonic()
    wait_for(lambda: time.monotonic() > began + 60, "a minute")
    calls = [c["verb"] for c in space.server.calls()[before:] if c["objectRef"]["resource"] != "leases"]
    # One more try, 30 s later: at most 4 creates, what they brought given back, an event, the status.
    assert len(calls) <= 12, calls


def test_groups_that_go_and_suspend_and_change_their_size(
    space: Namespace, operator: OperatorProcess
) -> None:
    space.create(cluster(group("a", 2, 2), group("b", 1, 2)))
    space.see(lambda: len(space.workers()) == 6, "both groups")
    space.run(*space.pods())
    # Suspended and resumed: the group, then the cluster.
    kept = space.uids(group="a")
    space.patch_group(1, suspend=True)
    space.see(lambda: space.uids() == kept, "group b to be away", kubelet=True)
    space.patch_group(1, suspend=False)
    space.see(lambda: len(space.workers()) == 6, "group b to be back", kubelet=True)
    space.patch({"spec": {"suspend": True}})
    space.see(lambda: not space.get("pods")["items"], "nothing left", kubelet=True)
    space.see(lambda: space.status()["state"] == "suspended", "the status to say so")
    space.patch({"spec": {"suspend": False}})
    space.see(lambda: len(space.pods()) == 7, "all to be back", kubelet=True)
    # Another size: one replica at a time, each once the one before is ready.
    space.run(*space.pods())
    before = space.uids(group="a")
    space.patch_group(0, numOfHosts=1)

    def one_is_new() -> bool:
        now = space.uids(group="a")
        return len(now) == 3 and len(now - before) == 1

    space.see(one_is_new, "one replica of the new size", kubelet=True)
    space.run(*space.workers(group="a"))
    space.see(lambda: space.places("a") == [(0, 0), (1, 0)], "both", kubelet=True)
    # A group that is removed.
    groups = space.cluster()["spec"]["workerGroupSpecs"][:1]
    space.patch({"spec": {"workerGroupSpecs": groups}})
    space.see(lambda: len(space.get("pods")["items"]) == 3, "group b to be gone", kubelet=True)


def test_pods_from_before_are_taken_in_or_named(space: Namespace, operator: OperatorProcess) -> None:
    space.create(cluster(group("one", 2, 1), group("many", 1, 2), suspend=True))
    space.see(lambda: space.status().get("state") == "suspended", "the cluster to be known")
    uid = space.cluster()["metadata"]["uid"]
    for name, of in (("old-one", "one"), ("old-many-a", "many"), ("old-many-b", "many")):
        space.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "labels": {"ray.io/node-type": "worker", "ray.io/group": of},
                    "ownerReferences": [
                        {
                            "apiVersion": "ray.io/v1",
                            "kind": "RayCluster",
                            "name": "demo",
                            "uid": uid,
                            "controller": True,
                        }
                    ],
                },
                "spec": {"containers": [{"name": "ray", "image": "ray"}]},
            }
        )
    space.patch({"spec": {"suspend": False}})
    for name in ("old-one", "old-many-a", "old-many-b"):
        space.server.kubectl("-n", space.name, "label", "pod", name, "ray.io/cluster=demo")
    space.see(
        lambda: space.condition("UnlabelledPods").get("status") == "True", "those of many hosts to be named"
    )
    assert "old-many-a" in space.condition("UnlabelledPods")["message"]
    space.see(
        lambda: space.places("one") in ([(0, 0), (1, 0)], [(0, 0), (1, 0), (2, 0)]), "one taken in, one made"
    )


def test_fields_that_nothing_is_done_with_are_named(space: Namespace, operator: OperatorProcess) -> None:
    strange = group(replicas=1, hosts=1)
    strange["frobnicate"] = True
    space.create(cluster(strange, idleTerminationOptions={"timeoutSeconds": 60}))
    space.see(lambda: space.condition("UnsupportedField").get("status") == "True", "the condition")
    message = space.condition("UnsupportedField")["message"]
    assert "spec.idleTerminationOptions" in message
    assert "spec.workerGroupSpecs[0].frobnicate" in message


def test_a_service_that_is_refused_is_told_and_holds_up_no_slices(
    space: Namespace, operator: OperatorProcess
) -> None:
    made = cluster(group(replicas=1))
    made["spec"]["headGroupSpec"]["headService"] = {"spec": {"type": "Telephone"}}
    space.create(made)
    space.see(lambda: space.condition("ReplicaFailure").get("status") == "True", "the condition")
    assert "demo-head-svc" in space.condition("ReplicaFailure")["message"]
    assert "Telephone" in space.condition("ReplicaFailure")["message"]
    space.see(lambda: len(space.pods()) == 5, "the head and a slice")
    space.patch({"spec": {"headGroupSpec": {"headService": None}}})
    space.see(lambda: space.condition("ReplicaFailure")["status"] == "False", "all to be well")
    assert "demo-head-svc" in {s["metadata"]["name"] for s in space.get("services")["items"]}


def test_clusters_that_are_not_ours_are_left_alone(space: Namespace, operator: OperatorProcess) -> None:
    plain = cluster(group(replicas=1, hosts=1), name="plain")
    del plain["metadata"]["annotations"]
    space.create(plain)
    space.create(cluster(group(replicas=1, hosts=1), name="kuberays", managedBy="ray.io/kuberay-operator"))
    space.create(cluster(group(replicas=1, hosts=1), name="ours"))
    space.see(lambda: len(space.pods()) == 2, "ours")
    assert {p["metadata"]["labels"]["ray.io/cluster"] for p in space.pods()} == {"ours"}
    assert not space.status("plain")
    assert not space.status("kuberays")
