"""Manifests of Ray clusters whose nodes can all live on this machine, as a ``ProcessKubelet`` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.testing.kube.server import free_ports


def ray_cluster(folder: str, *groups: dict[str, Any], cpus: int = 0, **spec: Any) -> dict[str, Any]:
    """Ports that nobody else has, since not all of Ray binds to its address.

    ``folder`` must be short: Ray's sockets lie deep in it.
    """
    port, dashboard_port = free_ports(2)
    head = {
        "port": str(port),
        "dashboard-port": str(dashboard_port),
        "include-dashboard": "false",
        "temp-dir": folder,
        "num-cpus": str(cpus),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "demo", "annotations": {"everstep.dev/managed": "true"}},
        "spec": {
            "headGroupSpec": {"rayStartParams": {**_SHARED, **head}, "template": _template()},
            "workerGroupSpecs": list(groups),
            **spec,
        },
    }


def ray_group(
    name: str, replicas: int, hosts: int, node_selector: Mapping[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    params = {**_SHARED, "object-store-memory": "80000000", **more.pop("rayStartParams", {})}
    template = _template()
    template["spec"]["nodeSelector"] = dict(node_selector or {})
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": 0,
        "maxReplicas": 4,
        "numOfHosts": hosts,
        "rayStartParams": params,
        "template": template,
        **more,
    }


_SHARED = {
    "node-ip-address": "$POD_IP",
    "min-worker-port": "0",
    "max-worker-port": "0",
    "dashboard-agent-listen-port": "0",
    "metrics-export-port": "0",
    "object-store-memory": "100000000",
    "disable-usage-stats": "true",
    # Of no use here, and a process each: nobody reads the workers' logs on the head, and an autoscaler that
    # is wanted comes beside it.
    "include-log-monitor": "false",
    "no-monitor": "true",
}


def _template() -> dict[str, Any]:
    started = ["bash", "-c", 'grep -q "Ray runtime started" "$POD_LOG"']
    container = {
        "name": "ray",
        "image": "rayproject/ray",
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "readinessProbe": {"exec": {"command": started}},
    }
    return {"spec": {"containers": [container], "terminationGracePeriodSeconds": 5}}
