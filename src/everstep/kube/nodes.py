"""Nodes, as far as they concern a slice: which of them are about to go, and why. Pure.

Kubernetes itself leaves a Pod on a node that doesn't answer for 300 s. A slice that has lost a host does
nothing useful meanwhile, so it is replaced earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from everstep.kube.view import PodView, time_of

NOT_READY_S = 30.0
"""A node that doesn't answer for longer than that isn't just restarting its kubelet."""

_TAINTS = {
    "node.kubernetes.io/out-of-service": "is out of service",
    "node.cloudprovider.kubernetes.io/shutdown": "is shut down",
    "cloud.google.com/impending-node-termination": "is about to be terminated",
    "karpenter.sh/disrupted": "is being drained by Karpenter",
    "aws-node-termination-handler/spot-itn": "is about to be interrupted",
    "aws-node-termination-handler/scheduled-maintenance": "has maintenance",
}
_LABELS = {("cloud.google.com/active-node-maintenance", "ONGOING"): "has maintenance"}
_GONE = ("node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown")
"""Nobody is there to end its Pods."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    going: str = ""
    """Why it is about to go, if it is."""
    gone: bool = False
    """Whether it is gone already, so that its Pods aren't waited for."""
    silent_since: float | None = None
    """Since when it has been silent."""


def node_view(node: Mapping[str, Any]) -> NodeView:
    meta = node["metadata"]
    labels = meta.get("labels") or {}
    taints = {taint["key"] for taint in (node.get("spec") or {}).get("taints") or ()}
    reasons = [why for key, why in _TAINTS.items() if key in taints]
    reasons += [why for (key, value), why in _LABELS.items() if labels.get(key) == value]
    conditions = {c["type"]: c for c in (node.get("status") or {}).get("conditions") or ()}
    ready = conditions.get("Ready")
    silent = ready is not None and ready.get("status") != "True"
    return NodeView(
        name=meta["name"],
        version=int(meta.get("resourceVersion") or 0),
        going=reasons[0] if reasons else "",
        gone=any(key in taints for key in _GONE),
        silent_since=time_of((ready or {}).get("lastTransitionTime")) if silent else None,
    )


def on_nodes(
    pods: Iterable[PodView], nodes: Mapping[str, NodeView], now: float
) -> tuple[list[PodView], float | None]:
    """The Pods, with what becomes of their nodes, and when to look again."""
    placed: list[PodView] = []
    looks: list[float] = []
    for pod in pods:
        node = nodes.get(pod.node)
        if node is not None and node.silent_since is not None and now < node.silent_since + NOT_READY_S:
            looks.append(node.silent_since + NOT_READY_S)
        placed.append(pod if node is None else _placed(pod, node, now))
    return placed, min(looks, default=None)


def _placed(pod: PodView, node: NodeView, now: float) -> PodView:
    silent = node.silent_since is not None and now >= node.silent_since + NOT_READY_S
    if silent or node.gone:
        return msgspec.structs.replace(pod, node_lost=True)
    if node.going:
        return msgspec.structs.replace(pod, going=f"its node {node.name} {node.going}")
    return pod


def notable(nodes: Iterable[NodeView]) -> dict[str, NodeView]:
    """Only those that there is something to say about."""
    return {node.name: node for node in nodes if node.going or node.gone or node.silent_since is not None}
