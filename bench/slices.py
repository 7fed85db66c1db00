"""``python -m bench.slices``: what the operator costs, from 10 slices of 4 hosts to 1,000, on a real server.

There is no kubelet: Pods are made, and stay pending. A heal is what follows when one Pod is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from everstep.kube import services
from everstep.kube.crd import custom_resource_definition
from everstep.kube.reconcile import Observed, reconcile
from everstep.kube.spec import parse
from everstep.kube.view import service_view, view
from everstep.testing.kube import ApiServer

HOSTS = 4
_MERGE = "application/merge-patch+json"
_LIMIT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.slices", description=__doc__)
    parser.add_argument("slices", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument(
        "--faults",
        action="store_true",
        help="meanwhile one Pod can't be deleted, a group is over its quota, and a node comes and goes",
    )
    options = parser.parse_args()
    sizes = options.slices
    table = Table("slices", "Pods", "made in", "calls to heal one slice", "healed in", "decision", "memory")
    with ApiServer() as server:
        server.kubectl("apply", "-f", "-", stdin=json.dumps(custom_resource_definition()))
        server.wait_until_served("rayclusters.ray.io")
        for size in sizes:
            table.add_row(*_measure(server, size, options.faults))
    Console(width=120).print(table)


def _measure(server: ApiServer, size: int, with_faults: bool) -> list[str]:
    space = f"bench-{size}"
    server.kubectl("create", "namespace", space)
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as around:
        command = [sys.executable, "-m", "everstep.cli.main", "operator", "run", "--namespace", space]
        operator = subprocess.Popen(
            [*command, "--kubeconfig", str(server.kubeconfig)], stdout=log, stderr=log
        )
        try:
            began = time.monotonic()
            server.kubectl("-n", space, "apply", "-f", "-", stdin=json.dumps(_cluster(size)))
            _wait(lambda: _known(server, space) == size)
            made_in = time.monotonic() - began
            cluster = server.request("GET", _cluster_path(space))
            pods = server.request("GET", f"/api/v1/namespaces/{space}/pods")["items"]
            victim = next(
                p
                for p in pods
                if p["metadata"]["labels"].get("ray.io/worker-group-replica-index") == str(size // 2)
            )
            if with_faults:
                around.enter_context(_faults(server, space, pods))
            before = len(_calls(server, space))
            began = time.monotonic()
            path = f"/api/v1/namespaces/{space}/pods"
            server.request("DELETE", f"{path}/{victim['metadata']['name']}")
            selector = f"ray.io/worker-group-replica-index%3D{size // 2}"
            old = victim["metadata"]["labels"]["ray.io/worker-group-replica-name"]

            def healed() -> bool:
                found = server.request("GET", f"{path}?labelSelector={selector}")["items"]
                names = {p["metadata"]["labels"]["ray.io/worker-group-replica-name"] for p in found}
                return len(found) == HOSTS and old not in names

            _wait(healed)
            healed_in = time.monotonic() - began
            time.sleep(1.0)  # the status follows, if what it lists has changed
            calls = Counter(_calls(server, space)[before:])
            memory = _resident(operator.pid)
        finally:
            operator.terminate()
            operator.wait(30)
    spent = ", ".join(f"{count} {verb}" for verb, count in sorted(calls.items()))
    decision = _decide(cluster, pods)
    made, healed_s, decided = f"{made_in:.1f} s", f"{healed_in:.2f} s", f"{decision * 1e3:.1f} ms"
    return [str(size), str(size * HOSTS), made, spent, healed_s, decided, f"{memory / 2**20:.0f} MiB"]


@contextlib.contextmanager
def _faults(server: ApiServer, space: str, pods: list[dict[str, Any]]) -> Iterator[None]:
    """One Pod that fails and can't be deleted, one replica more than the quota has, one node that flaps."""
    workers = [p for p in pods if p["metadata"]["labels"]["ray.io/node-type"] == "worker"]
    hard = {"pods": str(len(pods))}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": hard},
    }
    server.kubectl("-n", space, "apply", "-f", "-", stdin=json.dumps(quota))
    used = {"status": {"hard": hard, "used": hard}}
    path = f"/api/v1/namespaces/{space}"
    server.request("PATCH", f"{path}/resourcequotas/pods/status", used, _MERGE)
    webhooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    server.request("POST", webhooks, _keeper(space))
    stuck = f"{path}/pods/{workers[0]['metadata']['name']}"
    server.request("PATCH", stuck, {"metadata": {"labels": {"kept": space}}}, _MERGE)
    server.request("PATCH", f"{stuck}/status", {"status": {"phase": "Failed"}}, _MERGE)
    node = f"/api/v1/nodes/{space}"
    server.request("POST", "/api/v1/nodes", {"metadata": {"name": space}})
    name = workers[-1]["metadata"]["name"]
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"name": space}}
    server.request("POST", f"{path}/pods/{name}/binding", binding)
    stop = threading.Event()

    def flap() -> None:
        said = True
        while not stop.wait(1.0):
            said = not said
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            ready = {"type": "Ready", "status": "True" if said else "Unknown", "lastTransitionTime": now}
            server.request("PATCH", f"{node}/status", {"status": {"conditions": [ready]}}, _MERGE)

    flapping = threading.Thread(target=flap)
    flapping.start()
    time.sleep(10.0)  # by then there are some failures
    used["status"]["used"] = {"pods": str(len(pods) - HOSTS)}
    server.request("PATCH", f"{path}/resourcequotas/pods/status", used, _MERGE)
    try:
        yield
    finally:
        stop.set()
        flapping.join()
        server.request("DELETE", node)
        server.request("DELETE", f"{webhooks}/{space}")


def _keeper(space: str) -> dict[str, Any]:
    """Nobody answers whether a Pod with the label may be deleted, and so it may not."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["DELETE"]}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": space},
        "webhooks": [
            {
                "name": "keeper.example.com",
                "clientConfig": {"url": "https://127.0.0.1:9/nobody"},
                "rules": [rule],
                "objectSelector": {"matchLabels": {"kept": space}},
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
            }
        ],
    }


def _decide(cluster: dict[str, Any], pods: list[dict[str, Any]]) -> float:
    """The median of deciding what to do about one missing Pod."""
    parsed, views = parse(cluster), [view(pod) for pod in pods[1:]]
    there = {s["metadata"]["name"]: service_view(s) for s in services.wanted(parsed)}
    seen = Observed(pods=views, services=there)
    # The operator keeps no manifests; ours shouldn't be walked through by the collector meanwhile.
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(9):
        began = time.perf_counter()
        plan = reconcile(parsed, seen, time.time())
        times.append(time.perf_counter() - began)
    assert plan.actions, "a Pod is missing"
    return sorted(times)[4]


def _known(server: ApiServer, space: str) -> int:
    groups = (server.request("GET", _cluster_path(space)).get("status") or {}).get("groups") or [{}]
    return len(groups[0].get("replicas") or ()) + int(groups[0].get("unlisted") or 0)


def _calls(server: ApiServer, space: str) -> list[str]:
    """What the operator asked of the server in a namespace, but for its lease and the watches that go on."""
    return [
        f"{call['verb']} {call['objectRef']['resource']}"
        for call in server.calls()
        if call.get("objectRef", {}).get("namespace") == space
        and call["objectRef"]["resource"] != "leases"
        and call["verb"] not in ("list", "watch")
    ]


def _cluster_path(space: str) -> str:
    return f"/apis/ray.io/v1/namespaces/{space}/rayclusters/slices"


def _cluster(size: int) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "ray", "image": "rayproject/ray"}]}}
    group = {"groupName": "tpu", "replicas": size, "numOfHosts": HOSTS, "template": template}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "slices", "annotations": {"everstep.dev/managed": "true"}},
        "spec": {"headGroupSpec": {"template": template}, "workerGroupSpecs": [group]},
    }


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the operator didn't get there")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
