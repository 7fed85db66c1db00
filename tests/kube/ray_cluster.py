"""Manifests of Ray clusters whose nodes can all live on this machine."""

from __future__ import annotations

from typing import Any

from kube.live import free_port


def ray_cluster(folder: str, *groups: dict[str, Any], cpus: int = 0, **spec: Any) -> dict[str, Any]:
    """Ports that nobody else has, since not all of Ray binds to its address. ``folder`` must be short."""
    head = {
        "port": str(free_port()),
        "dashboard-port": str(free_port()),
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


def ray_group(name: str, replicas: int, hosts: int, **more: Any) -> dict[str, Any]:
    params = {**_SHARED, "object-store-memory": "80000000", **more.pop("rayStartParams", {})}
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": 0,
        "maxReplicas": 4,
        "numOfHosts": hosts,
        "rayStartParams": params,
        "template": _template(),
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
}


def _template() -> dict[str, Any]:
    started = ["bash", "-c", 'grep -q "Ray runtime started" "$POD_LOG"']
    container = {
        "name": "ray",
        "image": "ray",
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "readinessProbe": {"exec": {"command": started}},
    }
    return {"spec": {"containers": [container], "terminationGracePeriodSeconds": 5}}
