"""Suspended and resumed as Kueue wants it: by the fields that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.testing.kube import ApiServer
from kube.live import Namespace, OperatorProcess, operating
from kube.test_slices import cluster
from kube.world import group, template


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


@pytest.fixture(autouse=True)
def operator(space: Namespace, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operating(space.server, tmp_path, "--namespace", space.name) as running:
        yield running


class Kueue:
    """What Kueue's integration of RayClusters reads and writes, and no more."""

    def __init__(self, space: Namespace) -> None:
        self._space = space

    def is_active(self) -> bool:
        """While it is, its quota isn't given to anybody else."""
        return self._space.status().get("state") == "ready"

    def start(self, *podsets: dict[str, Any]) -> None:
        """The head's, then the groups': selectors and tolerations of the flavours they were given, and by
        which labels and annotations their topology's Pods are found.
        """
        spec = self._space.cluster()["spec"]
        members = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
        for member, info in zip(members, podsets, strict=True):
            template = member["template"]
            template["spec"].setdefault("nodeSelector", {}).update(info)
            template["spec"]["tolerations"] = [{"key": "flavour", "operator": "Exists"}]
            found = template.setdefault("metadata", {})
            found.setdefault("labels", {})["kueue.x-k8s.io/podset"] = member.get("groupName", "head")
            found.setdefault("annotations", {})["kueue.x-k8s.io/workload"] = "raycluster-demo"
        self._space.patch({"spec": {**spec, "suspend": False}})

    def stop(self) -> None:
        """Evicted: suspended, and the templates as they were."""
        spec = self._space.cluster()["spec"]
        for member in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            member["template"]["spec"].update(nodeSelector=None, tolerations=None)
        self._space.patch({"spec": {**spec, "suspend": True}})


def conditions(space: Namespace) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in space.status().get("conditions") or ()}


def test_kueue_starts_evicts_and_starts_again(space: Namespace) -> None:
    kueue = Kueue(space)
    racks = group(replicas=2, hosts=2)
    wanted = {
        "kueue.x-k8s.io/podset-slice-required-topology": "example.com/rack",
        "kueue.x-k8s.io/podset-slice-size": "2",
    }
    racks["template"]["metadata"] = {"annotations": wanted}
    made = cluster(racks, suspend=True)
    made["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "mine"}
    space.create(made)
    space.see(lambda: space.status().get("state") == "suspended", "it to wait for its admission")
    assert not space.pods()
    kueue.start({"flavour": "small"}, {"flavour": "tpu"})
    space.see(lambda: len(space.pods()) == 5, "its Pods")
    for pod in space.workers():
        assert pod["spec"]["nodeSelector"]["flavour"] == "tpu"
        assert {"key": "flavour", "operator": "Exists"} in pod["spec"]["tolerations"]
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "tpu"
        assert wanted.items() < pod["metadata"]["annotations"].items()
    assert not kueue.is_active()
    space.run(*space.pods())
    space.see(kueue.is_active, "it to be active")
    assert conditions(space)["RayClusterProvisioned"] == ("True", "AllPodRunningAndReadyFirstTime")

    # Evicted: its quota is its own until the last Pod is gone, also of those that only just leave.
    kueue.stop()
    space.see(
        lambda: conditions(space)["RayClusterSuspending"] == ("True", "RayClusterSuspending"),
        "its end to begin",
    )
    space.see(lambda: not space.pods(), "all Pods to be told to leave")
    leaving = space.get("pods")["items"]
    assert len(leaving) == 5
    for pod in leaving[:-1]:
        space.end(pod)
    space.see(lambda: len(space.get("pods")["items"]) == 1, "one to be left")
    assert kueue.is_active(), "one Pod still runs"
    assert conditions(space)["RayClusterSuspended"][0] == "False"
    space.end(leaving[-1])
    space.see(lambda: space.status().get("state") == "suspended", "it to be suspended")
    now = conditions(space)
    assert now["RayClusterSuspended"] == ("True", "RayClusterSuspended")
    assert now["RayClusterSuspending"][0] == "False"
    assert now["RayClusterProvisioned"] == ("False", "RayClusterPodsProvisioning")

    # Admitted again, elsewhere.
    kueue.start({"flavour": "small"}, {"flavour": "other"})
    space.see(lambda: len(space.pods()) == 5, "its Pods again")
    assert not kueue.is_active()
    space.run(*space.pods())
    space.see(kueue.is_active, "it to be active again")
    assert {p["spec"]["nodeSelector"]["flavour"] for p in space.workers()} == {"other"}
    assert set(space.status()["stateTransitionTimes"]) == {"ready", "suspended"}


def test_a_suspension_that_is_taken_back_is_brought_to_its_end_first(space: Namespace) -> None:
    space.create(cluster(group(replicas=1, hosts=2)))
    space.see(lambda: len(space.pods()) == 3, "its Pods")
    space.run(*space.pods())
    space.see(lambda: space.status().get("state") == "ready", "it to be ready")
    before = {p["metadata"]["uid"] for p in space.pods()}
    space.patch({"spec": {"suspend": True}})
    space.see(lambda: conditions(space)["RayClusterSuspending"][0] == "True", "its end to begin")
    space.patch({"spec": {"suspend": False}})
    space.see(
        lambda: len(space.pods()) == 3 and not before & {p["metadata"]["uid"] for p in space.pods()},
        "all anew",
        kubelet=True,
    )
    space.see(lambda: conditions(space)["RayClusterSuspending"][0] == "False", "the status to say so")


def test_what_kubectl_and_dashboards_read_is_there(space: Namespace) -> None:
    made = cluster(group(replicas=2, hosts=2))
    asked = {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1500m"}}
    made["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"] = asked
    space.create(made)
    space.see(lambda: len(space.pods()) == 5, "its Pods")
    for pod in space.pods():
        space.run(pod)
        space.say(pod, podIP="10.1.2.3")
    space.see(lambda: space.status().get("state") == "ready", "it to be ready")
    said = space.status()
    assert (said["desiredCPU"], said["desiredMemory"]) == ("6", "4Gi")
    assert (said["desiredGPU"], said["desiredTPU"]) == ("0", "0")
    assert said["head"]["serviceIP"] == said["head"]["podIP"] == "10.1.2.3"
    assert said["endpoints"]["dashboard"] == "8265"
    assert (said["availableWorkerReplicas"], said["readyWorkerReplicas"]) == (4, 4)


def test_what_is_created_is_told_in_kuberays_words(space: Namespace) -> None:
    counted = {"rayStartParams": {"num-cpus": "1"}}
    head_group = {"template": template(), **counted}
    space.create(
        cluster(group("tpu", 2, 2, **counted), enableInTreeAutoscaling=True, headGroupSpec=head_group)
    )

    def told() -> dict[str, str]:
        return {event["reason"]: event["message"] for event in space.get("events")["items"]}

    space.see(lambda: len(told()) == 6, "all of them")
    [head] = space.pods(group="headgroup")
    said = told()
    assert said["CreatedHeadPod"] == f"Created head Pod {space.name}/{head['metadata']['name']}"
    assert said["CreatedServiceAccount"] == f"Created service account {space.name}/demo"
    assert {"CreatedService", "CreatedRole", "CreatedRoleBinding"} < set(said)
    assert said["CreatedWorkerPod"].startswith("Created 4 worker Pods of tpu, replicas 0, 1: ")
    assert all(pod["metadata"]["name"] in said["CreatedWorkerPod"] for pod in space.workers())
    # And what can't be created, whatever else is changed meanwhile.
    space.patch({"spec": {"tlsOptions": {"enabled": True}}})
    space.see(lambda: "tlsOptions" in told().get("InvalidRayClusterSpec", ""), "why it is refused")
