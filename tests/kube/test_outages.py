"""An API server that is away, etcd that hangs, namespaces that are gone: the operator stays, and does nothing
twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.testing.kube import ApiServer
from kube.live import MERGE, Namespace, install, operating, outlast
from kube.test_slices import cluster
from kube.world import group
from processes import wait_for


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


@pytest.fixture
def own_server(programs: None) -> Iterator[ApiServer]:
    """One that may go away: what tests share is there for all of them."""
    with ApiServer() as server:
        install(server)
        yield server


def is_whole(space: Namespace, replicas: int) -> bool:
    return space.places() == [(i, h) for i in range(replicas) for h in range(2)]


def answers(space: Namespace) -> bool:
    """Whether the API server does, with all that is there. It gives up some requests after etcd has hung."""
    try:
        return bool(space.get("pods")["items"])
    except OSError:
        return False


@pytest.mark.parametrize(
    ("lease_s", "away_s"),
    [
        pytest.param(4, 0, id="until the lease has run out"),
        pytest.param(15, 60, marks=pytest.mark.soak, id="60 s"),
    ],
)
def test_it_outlives_the_api_server_and_etcd_and_does_nothing_twice(
    own_server: ApiServer, tmp_path: Path, lease_s: int, away_s: float
) -> None:
    space = Namespace(own_server)
    arguments = ("--namespace", space.name, "--lease-seconds", str(lease_s))
    with operating(own_server, tmp_path, *arguments) as operator:
        space.create(cluster(group(replicas=2, hosts=2)))
        space.see(lambda: is_whole(space, 2), "two slices")
        space.run(*space.pods())
        space.see(lambda: space.status().get("slices") == "2/2", "both ready")
        whole = space.uids()
        with own_server.away():
            operator.hear("nothing more is written until it is back")
            outlast(away_s)
        assert operator.is_alive
        assert space.uids() == whole, "nothing leaves"
        gone = space.uids(index=1)
        space.say(space.workers(index=1)[0], phase="Failed")
        space.see(lambda: space.anew(4, gone), "a heal after it was back", kubelet=True)
        space.run(*space.pods())
        said = operator.log.read_text().count("nothing more is written until it is back")
        with own_server.paused("etcd"):
            wait_for(
                lambda: operator.log.read_text().count("nothing more is written") > said,
                "the lease to run out again",
            )
            outlast(away_s)
        space.see(lambda: answers(space), "etcd to answer")
        gone = space.uids(index=0)
        space.say(space.workers(index=0)[0], phase="Failed")
        space.see(lambda: space.anew(4, gone), "a heal after it went on", kubelet=True)
        assert operator.is_alive
        assert is_whole(space, 2)
        # Each place was filled as often as it was made empty, and no oftener.
        made = Counter(
            line.split("creating replica ")[1].split(" of")[0]
            for line in operator.log.read_text().splitlines()
            if "creating replica" in line
        )
        assert made == {"0": 2, "1": 2}


def test_a_namespace_that_is_gone_keeps_it_from_no_other(space: Namespace, tmp_path: Path) -> None:
    arguments = ("--namespace", f"{space.name}-later", "--namespace", space.name)
    with operating(space.server, tmp_path, *arguments) as operator:
        operator.hear(f"there is no namespace {space.name}-later")
        space.create(cluster(group(replicas=1, hosts=2)))
        space.see(lambda: is_whole(space, 1), "a slice in the one that is there")
        # The other one comes.
        space.server.kubectl("create", "namespace", f"{space.name}-later")
        later = Namespace.__new__(Namespace)
        later.server, later.name = space.server, f"{space.name}-later"
        later.create(cluster(group(replicas=1, hosts=2)))
        later.see(lambda: is_whole(later, 1), "a slice there, too")


def test_what_others_write_into_the_status_is_put_right(space: Namespace, tmp_path: Path) -> None:
    with operating(space.server, tmp_path, "--namespace", space.name):
        space.create(cluster(group(replicas=1, hosts=2)))
        space.see(lambda: space.status().get("slices") == "0/1", "a status")
        before = space.status()
        path = f"/apis/ray.io/v1/namespaces/{space.name}/rayclusters/demo/status"
        wrong = {"status": {"slices": "9/9", "state": "failed", "head": {"podName": "nobody", "odd": "x"}}}
        space.server.request("PATCH", path, wrong, MERGE)
        space.see(
            lambda: all(space.status().get(key) == before.get(key) for key in wrong["status"]),
            "what was there before",
        )


def test_retries_are_one_event_that_is_counted_up(space: Namespace, tmp_path: Path) -> None:
    space.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "pods"},
            "spec": {"hard": {"pods": "0"}},
        }
    )
    path = f"/api/v1/namespaces/{space.name}/resourcequotas/pods/status"
    space.server.request("PATCH", path, {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}, MERGE)

    def about_the_head() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = space.get("events")["items"]
        return [e for e in events if "the head is refused" in e["message"]]

    with operating(space.server, tmp_path, "--namespace", space.name):
        space.create(cluster(group(replicas=0)))
        space.see(lambda: [e for e in about_the_head() if e["count"] >= 3], "some retries")
    with operating(space.server, tmp_path, "--namespace", space.name):
        space.see(lambda: [e for e in about_the_head() if e["count"] >= 5], "some more, of another life")
    assert len(about_the_head()) == 1


def definition(kind: str) -> dict[str, Any]:
    """Of KubeRay's, as far as it matters here."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    plural = f"{kind.lower()}s"
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.ray.io"},
        "spec": {
            "group": "ray.io",
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [version],
        },
    }


@pytest.fixture
def defined(space: Namespace) -> Iterator[None]:
    """KubeRay's other kinds, for as long as the test lasts."""
    kinds = [definition(kind) for kind in ("RayJob", "RayService")]
    for kind in kinds:
        space.server.define(kind)
    yield
    for kind in kinds:
        space.server.kubectl("delete", "crd", kind["metadata"]["name"])


@pytest.mark.usefixtures("defined")
def test_jobs_and_services_that_nobody_runs_are_answered(space: Namespace, tmp_path: Path) -> None:
    def answered() -> set[str]:
        events = space.get("events")["items"]
        return {e["involvedObject"]["name"] for e in events if e["reason"] == "NotSupported"}

    def make(kind: str, name: str, **spec: Any) -> None:
        meta = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": name}}
        space.apply({**meta, "spec": {"entrypoint": "python train.py", **spec}})

    make("RayJob", "before")
    make("RayJob", "elsewhere", managedBy="kueue.x-k8s.io/multikueue")
    there = {"before"}
    for life in ("first", "second"):
        with operating(space.server, tmp_path, "--namespace", space.name):
            make("RayService", life)
            there.add(life)
            space.see(lambda: answered() == there, "all to be answered")
    assert len(space.get("events")["items"]) == 3, "once each, whoever asks"
