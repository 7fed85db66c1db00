"""The kubelet of these tests ends Pods as a real one does."""

from __future__ import annotations

from typing import Any

from everstep.testing.kube import ApiServer, ProcessKubelet
from kube.live import Namespace


def stubborn(name: str, grace_s: int, **lifecycle: Any) -> dict[str, Any]:
    """It doesn't heed SIGTERM."""
    command = ["bash", "-c", "trap '' TERM; exec sleep 1000"]
    container = {"name": "ray", "image": "work", "command": command, "lifecycle": lifecycle}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"ray.io/node-type": "worker"}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": grace_s},
    }


def test_a_hook_that_takes_the_whole_grace_leaves_little_for_the_end(server: ApiServer) -> None:
    """A Pod whose hook and end had a grace each would outlast one with half as much again."""
    space = Namespace(server)
    hook = {"exec": {"command": ["sleep", "1000"]}}
    with ProcessKubelet(server, [space.name], space.name):
        space.create(stubborn("hooked", 8, preStop=hook))
        space.create(stubborn("patient", 13))
        space.see(lambda: [p["status"]["phase"] for p in space.pods()] == ["Running"] * 2, "both")
        for pod in space.pods():
            space.delete_pod(pod)
        space.see(lambda: len(space.get("pods")["items"]) < 2, "one of them to be gone")
        assert [pod["metadata"]["name"] for pod in space.get("pods")["items"]] == ["patient"]
