"""Capacity that a run wants and the cluster doesn't have: pending placement groups, for Ray's autoscaler.

``request_resources`` is one slot for the whole cluster, and two runs would erase each other's. A pending
group is each run's own. Ours ask for nodes that aren't there yet, so that they take nothing of what is there;
a group that Ray has placed has done its work, and is removed.

Of nodes that it could start, the autoscaler knows the resources, and of their labels only those that the
cluster's own configuration names (on Kubernetes ``workerGroupSpecs[].labels``). So the groups name no label
that a node must have, unless the user does: they rule out wrong values. A node type without labels may be the
right one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.accelerators import accelerators
from ray.util.placement_group import placement_group

from everstep.engine.base import EngineRequest
from everstep.engine.ray import cluster
from everstep.topology.accelerators import TopologyError, generation_of, slice_shape
from everstep.topology.discovery import ACCELERATOR, TPU_TOPOLOGY
from everstep.topology.slices import HostId
from everstep.topology.wanted import Wanted

_KINDS = sorted({value for name, value in vars(accelerators).items() if name.isupper()})
"""What Ray calls accelerators in its label, of those that it knows."""


@dataclass(frozen=True)
class Wish:
    """One placement group."""

    bundles: list[dict[str, float]]
    apart: bool
    """Each bundle is a host of its own."""
    labels: dict[str, str]
    """What the labels of each host must be."""


class Demand:
    """Keeps as many groups pending as there are slices missing. Called on one thread at a time."""

    def __init__(self, tag: str, request: EngineRequest) -> None:
        self._tag = f"{tag}demand/"
        self._request = request
        self._number = 0
        self._settled: frozenset[HostId] = frozenset()

    def update(
        self,
        workers_short: int,
        nodes: Sequence[cluster.Node],
        arriving: Collection[HostId],
        groups: dict[str, dict[str, Any]],
    ) -> None:
        """Look at what is asked for, and make it fit what is missing now. ``arriving`` are hosts of slices
        that aren't complete yet. A group that has come to be on such hosts stands: the rest of their slices
        is still missing, and is what the others ask for.
        """
        asked = {n: r for n, r in groups.items() if r["name"].startswith(self._tag)}
        met = {n for n, r in asked.items() if r["state"] == "CREATED" and not nodes_of(r) <= set(arriving)}
        settled = frozenset(node.id for node in nodes if node.alive) - set(arriving)
        if settled != self._settled:  # what was asked for may have come, in part
            met |= {n for n, r in asked.items() if r["state"] != "CREATED"}
            self._settled = settled
        wish = self.wish(nodes)
        per_group = self._workers_per_group(len(wish.bundles))
        missing = -(-workers_short // per_group) if per_group else 0
        standing = [n for n in asked if n not in met]
        for number in [*met, *standing[missing:]]:
            cluster.remove_group(number)
        if any(nodes_of(asked[number]) for number in met):
            return  # what they held counts as missing until the cluster is read again
        for _ in range(missing - len(standing)):
            self._number += 1
            placement_group(
                wish.bundles,
                strategy="STRICT_SPREAD" if wish.apart else "PACK",
                name=f"{self._tag}{self._request.lease}.{self._number}",
                lifetime="detached",
                bundle_label_selector=[wish.labels for _ in wish.bundles],
            )

    def wish(self, nodes: Sequence[cluster.Node]) -> Wish:
        """What one group asks for: a slice; a lone host where slices have no known shape."""
        wanted = self._request.wanted
        need = {name: amount for name, amount in wanted.per_worker.items() if amount > 0}
        labels = self._labels(nodes)
        if wanted.topology is None or wanted.accelerator_type is None:
            hosts = wanted.hosts_per_slice or 1
            return Wish([need] * hosts, hosts > 1, labels)
        shape = slice_shape(wanted.accelerator_type, wanted.topology)
        if shape.hosts == 1:
            # The same topology also comes as several hosts with fewer chips: workers fit either way.
            return Wish([need] * shape.workers(need["TPU"]), False, labels)
        slots = min(need["TPU"] * self._request.workers, shape.chips_per_host) / need["TPU"]
        return Wish([{name: amount * slots for name, amount in need.items()}] * shape.hosts, True, labels)

    def yield_to(self, hosts: Collection[HostId]) -> None:
        """Remove groups that hold any of these hosts, which are about to be reserved."""
        for number, record in cluster.groups(self._tag).items():
            if nodes_of(record) & set(hosts):
                cluster.remove_group(number)

    def _workers_per_group(self, hosts: int) -> int:
        wanted = self._request.wanted
        if wanted.topology is None or wanted.accelerator_type is None:
            return hosts
        return slice_shape(wanted.accelerator_type, wanted.topology).workers(wanted.per_worker["TPU"])

    def _labels(self, nodes: Sequence[cluster.Node]) -> dict[str, str]:
        seen = {value for node in nodes if (value := node.labels.get(ACCELERATOR)) is not None}
        ruled_out = {
            TPU_TOPOLOGY: other_topologies(self._request.wanted),
            ACCELERATOR: other_kinds(self._request.wanted, seen),
            cluster.NODE_ID: sorted(self._settled),
        }
        labels = {key: f"!in({','.join(values)})" for key, values in ruled_out.items() if values}
        return labels | dict(self._request.wanted.labels)


def nodes_of(group: dict[str, Any]) -> set[HostId]:
    """The nodes that a placement group holds something of."""
    return {node for node in group.get("bundles_to_node_id", {}).values() if node}


def other_topologies(wanted: Wanted) -> list[str]:
    """Of the same generation: what is of another is ruled out as that."""
    if wanted.topology is None or wanted.accelerator_type is None:
        return []
    return [t for t in generation_of(wanted.accelerator_type).topologies if t != wanted.topology]


def other_kinds(wanted: Wanted, seen: Collection[str] = ()) -> list[str]:
    """Accelerators that are not the wanted one: of those that Ray knows, and that nodes here have."""
    kind = wanted.accelerator_type
    return [] if kind is None else [other for other in sorted({*_KINDS, *seen}) if not _same(other, kind)]


def _same(one: str, other: str) -> bool:
    try:
        return generation_of(one) == generation_of(other)
    except TopologyError:
        return one.lower() == other.lower()
