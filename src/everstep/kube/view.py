"""Pods as the operator sees them: the few facts that decide, taken once when a Pod changes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from everstep.kube import names


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uid: str
    version: int
    """The API server's resource version: of two views, the higher is the later."""
    owner: str | None
    """The uid of the RayCluster that it belongs to."""
    node_type: str
    group: str
    replica: str | None = None
    index: int | None = None
    host: int | None = None
    hosts: int | None = None
    """How many hosts its replica was made with, if it says."""
    created: float = 0.0
    leaving: float | None = None
    """When its grace period is over; ``None`` while it isn't being deleted."""
    ready: bool = False
    unready_reason: str = ""
    """The kubelet's word for it."""
    running: bool = False
    scheduled: bool = False
    waiting_for: str = ""
    """Why it isn't ready."""
    broken: str = ""
    """Why it will never be ready again; empty while it may."""
    restarts: int = 0
    """How often Ray's container was started again, or is about to be."""
    node: str = ""
    node_lost: bool = False
    going: str = ""
    """Why it is about to lose its node, if it is."""
    template: str | None = None
    """Which template it was made of, as ``spec`` fingerprints them."""
    pod_group: str = ""
    """The PodGroup that it was made one of, if it was."""
    ip: str = ""
    autoscaler: bool = False
    """Whether Ray's autoscaler runs beside Ray there."""
    hint: tuple[str, int] | None = None
    """The replica's label and the host's index, as GKE's webhook wrote them before there were labels."""


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    """What of a Service can be wrong."""

    name: str
    version: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    selector: Mapping[str, str]
    type: str
    publishes_not_ready: bool
    ports: tuple[Mapping[str, Any], ...]
    ip: str = ""


def service_view(service: Mapping[str, Any]) -> ServiceView:
    meta, spec = service["metadata"], service.get("spec") or {}
    return ServiceView(
        name=meta["name"],
        version=int(meta.get("resourceVersion") or 0),
        labels=meta.get("labels") or {},
        annotations=meta.get("annotations") or {},
        selector=spec.get("selector") or {},
        type=spec.get("type") or "ClusterIP",
        publishes_not_ready=bool(spec.get("publishNotReadyAddresses")),
        ports=tuple(spec.get("ports") or ()),
        ip=spec.get("clusterIP") or "",
    )


def time_of(stamp: str | None) -> float | None:
    if not stamp:
        return None
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def view(pod: Mapping[str, Any]) -> PodView:
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    annotations = meta.get("annotations") or {}
    spec = pod.get("spec") or {}
    status = pod.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ray = _ray_status(spec, status)
    state = ray.get("state") or {}
    never = spec.get("restartPolicy") == "Never"
    restarts = int(ray.get("restartCount") or 0)
    if "terminated" in state and not never:
        restarts += 1
    index, host = _whole(labels.get(names.REPLICA_INDEX)), _whole(labels.get(names.HOST_INDEX))
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        version=int(meta.get("resourceVersion") or 0),
        owner=owner_of(pod),
        node_type=labels.get(names.NODE_TYPE, ""),
        group=labels.get(names.WORKER_GROUP, ""),
        replica=labels.get(names.REPLICA_NAME),
        index=index,
        host=host,
        hosts=_whole(annotations.get(names.HOSTS)),
        created=time_of(meta.get("creationTimestamp")) or 0.0,
        leaving=time_of(meta.get("deletionTimestamp")),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        unready_reason=(conditions.get("Ready") or {}).get("reason") or "",
        running=status.get("phase") == "Running",
        scheduled=bool(spec.get("nodeName")),
        waiting_for=_waiting_for(conditions, status),
        broken=_broken(status, state, never),
        restarts=restarts,
        node=spec.get("nodeName") or "",
        node_lost=_node_lost(status, conditions),
        going=_going(conditions),
        template=annotations.get(names.TEMPLATE),
        pod_group=annotations.get(names.POD_GROUP) or "",
        ip=status.get("podIP") or "",
        autoscaler=any(c.get("name") == names.AUTOSCALER for c in spec.get("containers") or ()),
        hint=_hint(labels, spec),
    )


def owner_of(found: Mapping[str, Any]) -> str | None:
    """The uid of the RayCluster that an object belongs to."""
    owners = found["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("kind") == names.KIND), None)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _ray_status(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = spec.get("containers") or ()
    name = containers[0]["name"] if containers else ""
    for container in status.get("containerStatuses") or ():
        if container.get("name") == name:
            found: Mapping[str, Any] = container
            return found
    return {}


def _waiting_for(conditions: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', '')}".rstrip(": ")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return f"container {container['name']}: {waiting.get('reason', 'waiting')}"
    return ""


def _broken(status: Mapping[str, Any], state: Mapping[str, Any], never: bool) -> str:
    phase = status.get("phase")
    if phase in ("Failed", "Succeeded", "Unknown"):
        ended = state.get("terminated") or {}
        why = status.get("reason") or ended.get("reason") or status.get("message") or ""
        code = f", exit code {ended['exitCode']}" if "exitCode" in ended else ""
        return f"{phase}{': ' + why if why else ''}{code}"
    if never and "terminated" in state:
        ended = state["terminated"]
        return (
            f"container exited with code {ended.get('exitCode')} ({ended.get('reason', 'no reason given')})"
        )
    return ""


def _node_lost(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    ready = conditions.get("Ready") or {}
    return (
        status.get("reason") == "NodeLost"
        or status.get("phase") == "Unknown"
        or ready.get("reason") in ("NodeLost", "NodeStatusUnknown")
    )


def _going(conditions: Mapping[str, Any]) -> str:
    target = conditions.get("DisruptionTarget") or {}
    if target.get("status") != "True":
        return ""
    return (
        f"it is about to be disrupted: {target.get('message') or target.get('reason') or 'no reason given'}"
    )


def _hint(labels: Mapping[str, str], spec: Mapping[str, Any]) -> tuple[str, int] | None:
    replica = labels.get(names.LEGACY_REPLICA)
    if not replica:
        return None
    for container in spec.get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == "TPU_WORKER_ID" and str(variable.get("value", "")).isdigit():
                return replica, int(variable["value"])
    return None
