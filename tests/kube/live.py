"""Hands for tests against the real API server: what a user, a kubelet and a killer would do."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep.kube.crd import custom_resource_definition
from everstep.testing.kube import ApiServer
from kube import quick
from processes import LIMIT_S, wait_for

MERGE = "application/merge-patch+json"
_LOOK_S = 0.05
"""A look at the API server takes a moment itself, and the server works on the same cores."""
_NUMBERS = itertools.count(1)


def install(server: ApiServer) -> None:
    server.define(custom_resource_definition())


class Namespace:
    """A namespace of one test, and what it does there."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.name = f"test-{next(_NUMBERS)}"
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.name}})

    def create(self, manifest: dict[str, Any]) -> None:
        """As ``apply`` does with what isn't there yet, but without a process for it."""
        api, kind = manifest["apiVersion"], manifest["kind"].lower()
        root = f"/apis/{api}" if "/" in api else f"/api/{api}"
        self.server.request("POST", f"{root}/namespaces/{self.name}/{kind}s", manifest)

    def apply(self, manifest: dict[str, Any], check: bool = True) -> str:
        return self.server.kubectl(
            "-n", self.name, "apply", "-f", "-", stdin=json.dumps(manifest), check=check
        )

    def get(self, kind: str, name: str = "", group: str = "/api/v1") -> Any:
        path = f"{group}/namespaces/{self.name}/{kind}" + (f"/{name}" if name else "")
        return self.server.request("GET", path)

    def pods(self, **labels: object) -> list[dict[str, Any]]:
        """Those that aren't leaving, by index."""
        keys = {
            "index": "ray.io/worker-group-replica-index",
            "group": "ray.io/group",
            "host": "ray.io/replica-host-index",
        }
        found = [
            pod
            for pod in self.get("pods")["items"]
            if "deletionTimestamp" not in pod["metadata"]
            and all(pod["metadata"]["labels"].get(keys.get(k, k)) == str(v) for k, v in labels.items())
        ]
        return sorted(
            found,
            key=lambda p: (
                p["metadata"]["labels"].get("ray.io/cluster", ""),
                p["metadata"]["labels"].get("ray.io/group", ""),
                int(p["metadata"]["labels"].get(keys["index"], -1)),
                int(p["metadata"]["labels"].get(keys["host"], -1)),
            ),
        )

    def workers(self, **labels: object) -> list[dict[str, Any]]:
        return [p for p in self.pods(**labels) if p["metadata"]["labels"]["ray.io/node-type"] == "worker"]

    def places(self, group: str | None = None) -> list[tuple[int, int]]:
        return [
            (
                int(p["metadata"]["labels"]["ray.io/worker-group-replica-index"]),
                int(p["metadata"]["labels"]["ray.io/replica-host-index"]),
            )
            for p in self.workers(**({"group": group} if group else {}))
        ]

    def uids(self, **labels: object) -> set[str]:
        return {p["metadata"]["uid"] for p in self.workers(**labels)}

    def anew(self, count: int, gone: set[str]) -> bool:
        """In one look: so many workers, and none of those."""
        now = self.uids()
        return len(now) == count and not now & gone

    def cluster(self, name: str = "demo") -> dict[str, Any]:
        found: dict[str, Any] = self.get("rayclusters", name, "/apis/ray.io/v1")
        return found

    def status(self, name: str = "demo") -> dict[str, Any]:
        found: dict[str, Any] = self.cluster(name).get("status") or {}
        return found

    def condition(self, kind: str, name: str = "demo") -> dict[str, Any]:
        return next((c for c in self.status(name).get("conditions") or () if c["type"] == kind), {})

    def events(self) -> str:
        """What `kubectl get events` would show, without a process for it."""
        return "\n".join(f"{event['reason']} {event['message']}" for event in self.get("events")["items"])

    def patch(self, change: dict[str, Any], name: str = "demo") -> None:
        path = f"/apis/ray.io/v1/namespaces/{self.name}/rayclusters/{name}"
        self.server.request("PATCH", path, change, MERGE)

    def patch_group(self, index: int = 0, name: str = "demo", **fields: Any) -> None:
        groups = self.cluster(name)["spec"]["workerGroupSpecs"]
        groups[index].update(fields)
        self.patch({"spec": {"workerGroupSpecs": groups}}, name)

    def delete_pod(self, pod: dict[str, Any]) -> None:
        self.server.request("DELETE", f"/api/v1/namespaces/{self.name}/pods/{pod['metadata']['name']}")

    @property
    def lease_path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.name}/leases/everstep-operator"

    def lease_holder(self) -> str:
        """Who holds the operator's lease, "" while there is none."""
        try:
            found: str = self.server.request("GET", self.lease_path)["spec"].get("holderIdentity") or ""
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return ""
        return found

    def clear(self) -> None:
        """No clusters, and nothing of theirs."""
        self.server.request("DELETE", f"/apis/ray.io/v1/namespaces/{self.name}/rayclusters")
        self.server.request("DELETE", f"/api/v1/namespaces/{self.name}/pods")
        for service in self.get("services")["items"]:
            path = f"/api/v1/namespaces/{self.name}/services/{service['metadata']['name']}"
            self.server.request("DELETE", path)

    # What a scheduler and a kubelet do.

    def bind(self, pod: dict[str, Any], node: str = "node-1") -> None:
        self.server.request(
            "POST",
            f"/api/v1/namespaces/{self.name}/pods/{pod['metadata']['name']}/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": pod["metadata"]["name"]},
                "target": {"name": node},
            },
        )

    def say(self, pod: dict[str, Any], **status: Any) -> None:
        path = f"/api/v1/namespaces/{self.name}/pods/{pod['metadata']['name']}/status"
        self.server.request("PATCH", path, {"status": status}, MERGE)

    def run(self, *pods: dict[str, Any]) -> None:
        """They run, and are ready."""
        for pod in pods:
            if not pod["spec"].get("nodeName"):
                self.bind(pod)
            self.say(
                pod,
                phase="Running",
                conditions=[{"type": "Ready", "status": "True"}],
                containerStatuses=[container(pod, restarts=0)],
            )

    def end(self, pod: dict[str, Any]) -> None:
        """The kubelet has ended it: it is gone."""
        path = f"/api/v1/namespaces/{self.name}/pods/{pod['metadata']['name']}"
        with contextlib.suppress(urllib.error.HTTPError):
            self.server.request("DELETE", path, {"gracePeriodSeconds": 0})

    def end_leaving(self, keep: Sequence[str] = ()) -> None:
        for pod in self.get("pods")["items"]:
            if "deletionTimestamp" in pod["metadata"] and pod["metadata"]["name"] not in keep:
                self.end(pod)

    def see(self, condition: Callable[[], object], what: str, kubelet: bool = False) -> None:
        """Wait until it is so, ending meanwhile what is told to leave if there is a kubelet."""

        def look() -> object:
            if kubelet:
                self.end_leaving()
            return condition()

        wait_for(look, what, look_s=_LOOK_S)


def outlast(seconds: float) -> None:
    """A minute is a minute."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until, "the time to pass", look_s=0.5)


def container(pod: dict[str, Any], restarts: int = 0, **state: Any) -> dict[str, Any]:
    first = pod["spec"]["containers"][0]
    return {
        "name": first["name"],
        "image": first["image"],
        "imageID": "",
        "ready": not state,
        "restartCount": restarts,
        "state": state or {"running": {}},
    }


class OperatorProcess:
    """``everstep operator run``, in a process of its own."""

    def __init__(self, kubeconfig: Path | str, *arguments: str, log: Path) -> None:
        self.log = log
        self._arguments = ["run", "-v", "--kubeconfig", str(kubeconfig), *arguments]

    def start(self) -> OperatorProcess:
        self.log.touch()
        self._process = quick.start(self._arguments, self.log, self.log)
        return self

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    def hear(self, text: str) -> None:
        """Wait until it has said so."""
        try:
            wait_for(lambda: self.said(text), f"the operator to say {text!r}", look_s=_LOOK_S)
        except AssertionError as error:
            raise AssertionError(
                f"{error}; it said:\n{self.log.read_text(errors='replace')[-3000:]}"
            ) from None

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        self._process.join(LIMIT_S)
        code = self._process.exitcode
        assert code is not None, f"the operator is still there; it said:\n{self.log.read_text()[-3000:]}"
        return code


@contextlib.contextmanager
def operating(server: ApiServer, tmp_path: Path, *arguments: str) -> Iterator[OperatorProcess]:
    with running(server.kubeconfig, tmp_path, *arguments) as operator:
        yield operator


@contextlib.contextmanager
def running(kubeconfig: Path, tmp_path: Path, *arguments: str) -> Iterator[OperatorProcess]:
    operator = OperatorProcess(kubeconfig, *arguments, log=tmp_path / "operator.log").start()
    try:
        operator.hear("looking after RayClusters")
        yield operator
    finally:
        operator.stop()


@contextlib.contextmanager
def account(space: Namespace, folder: Path) -> Iterator[Path]:
    """The kubeconfig of an operator with no rights but those in the manifests."""
    server, home = space.server, f"{space.name}-home"
    wanted = ("manifests", "--image", "x", "--home", home, "-n", space.name)
    made = quick.everstep(*wanted, kubeconfig=server.kubeconfig, folder=folder)
    assert made.returncode == 0, made.stderr
    server.kubectl("apply", "-f", "-", stdin=made.stdout)
    token = server.request(
        "POST",
        f"/api/v1/namespaces/{home}/serviceaccounts/everstep-operator/token",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
    )["status"]["token"]
    config = json.loads(server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    theirs = folder / "kubeconfig"
    theirs.touch(mode=0o600)
    theirs.write_text(json.dumps(config))
    try:
        yield theirs
    finally:
        server.kubectl("delete", "validatingwebhookconfiguration", "everstep-operator")
