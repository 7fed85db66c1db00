"""One thing that fails holds up nothing else, and what breaks under a quota gets its own back first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.testing.kube import ApiServer
from kube.live import MERGE, Namespace, OperatorProcess, operating
from kube.test_slices import cluster
from kube.world import group

WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


@pytest.fixture
def space(server: ApiServer) -> Namespace:
    return Namespace(server)


@pytest.fixture
def operator(space: Namespace, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operating(space.server, tmp_path, "--namespace", space.name) as running:
        yield running


@contextlib.contextmanager
def keeping(space: Namespace) -> Iterator[str]:
    """A label: Pods that carry it can't be deleted, since who is asked about that doesn't answer."""
    label = f"kept-{space.name}"
    space.server.request(
        "POST",
        WEBHOOKS,
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": label},
            "webhooks": [
                {
                    "name": "keeper.example.com",
                    "clientConfig": {"url": "https://127.0.0.1:9/nobody"},
                    "rules": [
                        {
                            "apiGroups": [""],
                            "apiVersions": ["v1"],
                            "resources": ["pods"],
                            "operations": ["DELETE"],
                        }
                    ],
                    "objectSelector": {"matchLabels": {label: "true"}},
                    "failurePolicy": "Fail",
                    "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                }
            ],
        },
    )
    try:
        yield label
    finally:
        space.server.request("DELETE", f"{WEBHOOKS}/{label}")


@pytest.fixture
def keeper(space: Namespace) -> Iterator[str]:
    with keeping(space) as label:
        yield label


def attempts(space: Namespace, pod: dict[str, Any]) -> int:
    """How often the operator has tried to delete it."""
    return sum(
        call["verb"] == "delete" and call["objectRef"].get("name") == pod["metadata"]["name"]
        for call in space.server.calls()
    )


@pytest.mark.usefixtures("operator")
def test_a_pod_that_cant_be_deleted_holds_up_no_other_group(space: Namespace, keeper: str) -> None:
    space.create(cluster(group("a", 1, 2), group("b", 2, 2)))
    space.see(lambda: len(space.workers()) == 6, "both groups")
    space.run(*space.pods())
    stuck = space.workers(group="a")[0]
    path = f"/api/v1/namespaces/{space.name}/pods/{stuck['metadata']['name']}"
    space.server.request("PATCH", path, {"metadata": {"labels": {keeper: "true"}}}, MERGE)
    space.say(stuck, phase="Failed")
    space.see(lambda: attempts(space, stuck) >= 5, "the operator to be in for a long wait")
    tried = attempts(space, stuck)
    for index in (0, 1):
        gone = space.uids(group="b", index=index)
        space.say(space.workers(group="b", index=index)[0], phase="Failed")
        space.see(lambda gone=gone: len(space.uids(group="b") - gone) == 4, "the slice anew", kubelet=True)  # type: ignore[misc]
    # Each of them would have waited for a turn of its own.
    assert attempts(space, stuck) <= tried + 1, "the slices didn't wait for its turn"
    # Nor does the end of everything else.
    space.patch({"spec": {"suspend": True}})
    space.see(
        lambda: [p["metadata"]["name"] for p in space.pods()] == [stuck["metadata"]["name"]],
        "all others to be told to leave",
    )


class Quota:
    """A quota of Pods. Nobody here counts as the quota controller does, so this does."""

    def __init__(self, space: Namespace, pods: int) -> None:
        self._space, self._hard = space, {"pods": str(pods)}
        meta = {"name": "pods"}
        space.create(
            {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta, "spec": {"hard": self._hard}}
        )
        self.count()

    def count(self) -> bool:
        used = {"pods": str(len(self._space.get("pods")["items"]))}
        path = f"/api/v1/namespaces/{self._space.name}/resourcequotas/pods/status"
        self._space.server.request("PATCH", path, {"status": {"hard": self._hard, "used": used}}, MERGE)
        return True


@pytest.mark.usefixtures("operator")
def test_a_slice_that_breaks_under_a_quota_gets_back_what_it_gave_back(space: Namespace) -> None:
    quota = Quota(space, 5)  # the head, and two slices of two hosts
    space.create(cluster(group(replicas=3, hosts=2)))
    space.see(lambda: bool(space.status().get("refused")), "the third to be refused")
    space.see(lambda: len(space.workers()) == 4, "two slices")
    space.run(*space.pods())
    [before] = space.status()["refused"]
    for index in (0, 1, 0):
        gone = space.uids(index=index)
        space.say(space.workers(index=index)[0], phase="Failed", reason="Evicted")
        space.see(lambda gone=gone: quota.count() and space.anew(4, gone), "it anew", kubelet=True)  # type: ignore[misc]
        space.run(*space.workers())
    [after] = [r for r in space.status()["refused"] if r["name"] == "Group/tpu"]
    assert after["attempts"] <= before["attempts"] + 1, "it didn't wait for the third's turn"
