"""``python -m bench.slices``: what the operator costs, from 10 slices of 4 hosts to 1,000, on a real server.

There is no kubelet: Pods are made, and stay pending. A heal is what follows when one Pod is deleted.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
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
_LIMIT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.slices", description=__doc__)
    parser.add_argument("slices", type=int, nargs="*", default=[10, 100, 1000])
    sizes = parser.parse_args().slices
    table = Table("slices", "Pods", "made in", "calls to heal one slice", "healed in", "decision", "memory")
    with ApiServer() as server:
        server.kubectl("apply", "-f", "-", stdin=json.dumps(custom_resource_definition()))
        server.kubectl("wait", "--for=condition=established", "crd/rayclusters.ray.io")
        for size in sizes:
            table.add_row(*_measure(server, size))
    Console(width=120).print(table)


def _measure(server: ApiServer, size: int) -> list[str]:
    space = f"bench-{size}"
    server.kubectl("create", "namespace", space)
    with tempfile.TemporaryFile() as log:
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
