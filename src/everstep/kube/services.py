"""A cluster's Services, as manifests, and what has to change in one that is there. Pure.

They are KubeRay's: the same names, ports and headless addresses. Only the selector of the head's differs: it
asks for nothing but the cluster and the node type, so that it finds a head whichever operator made it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from everstep.kube import names
from everstep.kube.spec import ClusterSpec, HeadSpec, Manifest
from everstep.kube.view import ServiceView

_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
_FLAGS = {
    "gcs-server": "port",
    "dashboard": "dashboard-port",
    "client": "ray-client-server-port",
    "metrics": "metrics-export-port",
}
"""The flags of ``ray start`` that move a port."""


def head_ports(head: HeadSpec) -> dict[str, int]:
    """Where the head listens, by the names that KubeRay gives its ports."""
    given = head.ray_start_params
    moved = {name: int(given.get(flag) or 0) for name, flag in _FLAGS.items()}
    return {name: moved.get(name) or port for name, port in _PORTS.items()}


def wanted(cluster: ClusterSpec) -> list[Manifest]:
    return [head_service(cluster), *([headless_service(cluster)] if cluster.needs_headless_service else [])]


def head_service(cluster: ClusterSpec) -> Manifest:
    head = cluster.head
    given = copy.deepcopy(head.service)
    meta, spec = given.get("metadata") or {}, given.get("spec") or {}
    # The user's ports come on top of Ray's, and win where they have the same name.
    own = list(spec.get("ports") or ())
    taken = {port.get("name") for port in own}
    spec["ports"] = own + [port for port in _service_ports(head) if port["name"] not in taken]
    if head.service_type:
        spec.setdefault("type", head.service_type)
    if not head.service and spec.get("type", "ClusterIP") == "ClusterIP":
        spec["clusterIP"] = "None"
    spec["selector"] = {names.CLUSTER: cluster.name, names.NODE_TYPE: names.HEAD}
    # A head that fails a probe for a moment isn't hidden from its workers.
    spec.setdefault("publishNotReadyAddresses", True)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": cluster.head_service,
            "namespace": cluster.namespace,
            "labels": {**(meta.get("labels") or {}), **names.labels(cluster.name, names.HEAD)},
            "annotations": {**(meta.get("annotations") or {}), **head.service_annotations},
            "ownerReferences": [cluster.as_owner],
        },
        "spec": spec,
    }


def headless_service(cluster: ClusterSpec) -> Manifest:
    """Gives each host of a slice a name that stays the same when the slice is replaced."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.headless_service(cluster.name),
            "namespace": cluster.namespace,
            # The label is how KubeRay knows that it is there.
            "labels": {**names.labels(cluster.name, names.WORKER), names.HEADLESS: cluster.name},
            "ownerReferences": [cluster.as_owner],
        },
        "spec": {
            "clusterIP": "None",
            "selector": {names.CLUSTER: cluster.name, names.NODE_TYPE: names.WORKER},
            # Hosts look for each other before they are ready.
            "publishNotReadyAddresses": True,
        },
    }


def change(there: ServiceView, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch that makes a Service what it should be; empty where it already is.

    Labels and annotations that others have put there stay. So does the name of who made it.
    """
    meta, spec = manifest["metadata"], manifest["spec"]
    patch: dict[str, Any] = {}
    for kind, has in (("labels", there.labels), ("annotations", there.annotations)):
        asked = {key: value for key, value in (meta.get(kind) or {}).items() if key != names.CREATED_BY}
        lacking = {key: value for key, value in asked.items() if has.get(key) != value}
        if lacking:
            patch.setdefault("metadata", {})[kind] = lacking
    changed: dict[str, Any] = {}
    if there.selector != spec["selector"]:
        changed["selector"] = {**dict.fromkeys(there.selector, None), **spec["selector"]}
    if "type" in spec and there.type != spec["type"]:
        changed["type"] = spec["type"]
    if there.publishes_not_ready != spec["publishNotReadyAddresses"]:
        changed["publishNotReadyAddresses"] = spec["publishNotReadyAddresses"]
    ports = [_whole(port) for port in spec.get("ports") or ()]
    if sorted(map(_place, ports)) != sorted(map(_place, there.ports)):
        # Node ports that were given out stay with their port.
        out = {port["name"]: port["nodePort"] for port in there.ports if "nodePort" in port}
        changed["ports"] = [
            {**port, **({"nodePort": out[port["name"]]} if port["name"] in out else {})} for port in ports
        ]
    if changed:
        patch["spec"] = changed
    return patch


def _service_ports(head: HeadSpec) -> list[Manifest]:
    declared = head.template["spec"]["containers"][0].get("ports") or ()
    ports = {
        port.get("name") or f"{port['containerPort']}-port": (port["containerPort"], port.get("protocol"))
        for port in declared
    } or {name: (number, None) for name, number in head_ports(head).items()}
    ports.setdefault("metrics", (head_ports(head)["metrics"], None))
    return [
        {
            "name": name,
            "port": number,
            "targetPort": number,
            "protocol": protocol or "TCP",
            **({"appProtocol": "tcp"} if (protocol or "TCP") == "TCP" else {}),
        }
        for name, (number, protocol) in sorted(ports.items())
    ]


def _whole(port: Mapping[str, Any]) -> Manifest:
    """With what the API server adds to a port of a Service."""
    return {"name": "", "protocol": "TCP", "targetPort": port.get("port"), **port}


def _place(port: Mapping[str, Any]) -> tuple[str, ...]:
    whole = _whole(port)
    return tuple(str(whole.get(key)) for key in ("name", "port", "targetPort", "protocol"))
