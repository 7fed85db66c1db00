"""From KubeRay to Everstep and back: nothing restarts, and a head that is replaced is found on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.testing.kube import ApiServer
from kube.kuberay import KubeRay, has, labels, reaches
from kube.live import MERGE, Namespace, operating
from kube.world import group, manifest

HEAD = {"group": "headgroup"}


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


def theirs(space: Namespace) -> KubeRay:
    """A cluster that KubeRay has brought up: two hosts alone at the indices 0 and 2, and a slice of two."""
    made = manifest(group("one", 2, 1), group("many", 1, 2))
    made["metadata"] = {"name": "demo"}
    space.create(made)
    kuberay = KubeRay(space, space.cluster())
    kuberay.head_service()
    kuberay.headless_service()
    kuberay.head("demo-head-kuberay")
    for index in (2, 0):
        kuberay.worker(f"demo-one-worker-{index}", "one", index)
    for host in range(2):
        kuberay.worker(f"demo-many-worker-{host}", "many", 0, "many-abcde", host)
    space.run(*space.pods())
    return kuberay


def annotate(space: Namespace, value: str | None) -> None:
    space.patch({"metadata": {"annotations": {"everstep.dev/managed": value}}})


def head_service(space: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = space.get("services", "demo-head-svc")
    return found


def uids(space: Namespace) -> set[str]:
    return {pod["metadata"]["uid"] for pod in space.pods()}


def taken_over(space: Namespace) -> None:
    """By Everstep: every Pod stays, at its place."""
    before = uids(space)
    [head] = space.pods(**HEAD)

    def is_described() -> bool:
        """As it is now: an earlier operator has left a status, too."""
        said = space.status()
        return bool(said) and (said["slices"], said["head"]["podName"]) == ("3/3", head["metadata"]["name"])

    annotate(space, "true")
    space.see(is_described, "the cluster to be taken over")
    assert uids(space) == before, "nothing restarts"
    assert space.places("one") == [(0, 0), (2, 0)], "each keeps its index"


def test_there_and_back_and_there_again_and_nothing_restarts(space: Namespace, tmp_path: Path) -> None:
    kuberay = theirs(space)
    with operating(space.server, tmp_path, "--namespace", space.name):
        taken_over(space)
        # A head of ours is found by KubeRay's Service, and a slice of ours is one that KubeRay knows.
        [head], workers = space.pods(**HEAD), space.uids()
        space.delete_pod(head)
        space.see(lambda: space.pods(**HEAD), "another head", kubelet=True)
        [head] = space.pods(**HEAD)
        space.see(lambda: reaches(head_service(space), head), "the Service to find the new head")
        assert space.uids() == workers, "a head's end is no worker's"
        gone = space.uids(group="many")
        space.delete_pod(space.workers(group="many")[0])
        space.see(lambda: space.anew(4, gone), "a slice of ours", kubelet=True)
        annotate(space, None)
        before = uids(space)
    assert kuberay.takes_on() == [], "it has nothing to make, and fails at nothing"
    assert uids(space) == before, "nothing restarts"
    # A head that KubeRay makes then is found, too.
    [head] = space.pods(**HEAD)
    space.end(head)
    kuberay.head("demo-head-again")
    [head] = space.pods(**HEAD)
    assert reaches(head_service(space), head)
    space.run(*space.pods())
    with operating(space.server, tmp_path, "--namespace", space.name):
        taken_over(space)


def test_services_are_put_right_whatever_is_done_to_them(space: Namespace, tmp_path: Path) -> None:
    theirs(space)
    with operating(space.server, tmp_path, "--namespace", space.name):
        annotate(space, "true")
        space.see(
            lambda: len(head_service(space)["spec"]["selector"]) == 2, "the selector that finds any head"
        )
        path = f"/api/v1/namespaces/{space.name}/services/demo-head-svc"
        wrong = {"spec": {"selector": {"ray.io/node-type": "worker"}, "ports": [{"port": 1}]}}
        space.server.request("PATCH", path, wrong, MERGE)
        [head] = space.pods(**HEAD)
        space.see(lambda: len(head_service(space)["spec"]["ports"]) == 5, "its ports again")
        space.see(lambda: reaches(head_service(space), head), "it to find the head again")
        # A port that the spec moves, moves.
        space.patch({"spec": {"headGroupSpec": {"rayStartParams": {"dashboard-port": "8266"}}}})
        space.see(lambda: 8266 in [p["port"] for p in head_service(space)["spec"]["ports"]], "the new port")
        space.server.request("DELETE", path)
        space.see(lambda: len(space.get("services")["items"]) == 2, "another Service")


def test_a_cluster_of_ours_is_one_that_kuberay_takes_on(space: Namespace, tmp_path: Path) -> None:
    made = manifest(group("many", 2, 2))
    made["metadata"] = {"name": "demo", "annotations": {"everstep.dev/managed": "true"}}
    space.create(made)
    with operating(space.server, tmp_path, "--namespace", space.name):
        space.see(lambda: len(space.pods()) == 5, "a head and two slices")
    assert KubeRay(space, space.cluster()).takes_on() == []
    wanted = {k: v for k, v in labels("demo", "worker", "many").items() if "created-by" not in k}
    assert all(has(pod, wanted) for pod in space.workers())
