"""Capacity that a run wants and the cluster doesn't have: pending placement groups, for Ray's autoscaler.

``request_resources`` is one slot for the whole cluster, and two runs would erase each other's. A pending
group is each run's own. Ours ask for nodes that aren't there yet, so that they take nothing of what is; one
that is met has done its work, and goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ray.util.placement_group import placement_group

from everstep.engine.base import Ask
from everstep.engine.ray import cluster
from everstep.topology.accelerators import slice_shape
from everstep.topology.discovery import ACCELERATOR, TPU_TOPOLOGY
from everstep.topology.slices import HostId


class Demand:
    """Keeps as many groups pending as there are slices missing. Called on one thread at a time."""

    def __init__(self, tag: str, ask: Ask) -> None:
        self._tag = f"{tag}demand/"
        self._ask = ask
        self._number = 0
        self._known: frozenset[HostId] = frozenset()

    def update(
        self, workers_short: int, nodes: Sequence[cluster.Node], groups: dict[str, dict[str, Any]]
    ) -> None:
        """Look at what is pending, and make it fit what is missing now."""
        pending = {n: r for n, r in groups.items() if r["name"].startswith(self._tag)}
        for number, record in list(pending.items()):
            if record["state"] == "CREATED":
                cluster.remove_group(number)
                del pending[number]
        present = frozenset(node.id for node in nodes if node.alive)
        if present != self._known:  # what was asked for may have come, in part
            for number in pending:
                cluster.remove_group(number)
            pending = {}
            self._known = present
        bundles = self._bundles()
        per_group = self._workers_per_group(len(bundles))
        missing = -(-workers_short // per_group) if per_group else 0
        for number in list(pending)[missing:]:
            cluster.remove_group(number)
        for _ in range(missing - len(pending)):
            self._number += 1
            placement_group(
                bundles,
                strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK",
                name=f"{self._tag}{self._ask.lease}.{self._number}",
                lifetime="detached",
                bundle_label_selector=[self._labels() for _ in bundles],
            )

    def yield_to(self, hosts: Collection[HostId]) -> None:
        """What a met demand holds of these hosts is wanted in earnest now."""
        for number, record in cluster.groups(self._tag).items():
            if set(record.get("bundles_to_node_id", {}).values()) & set(hosts):
                cluster.remove_group(number)

    def _bundles(self) -> list[dict[str, float]]:
        """The hosts of one slice; a lone host where slices have no known shape."""
        wanted = self._ask.wanted
        need = {name: amount for name, amount in wanted.per_worker.items() if amount > 0}
        if wanted.topology is None or wanted.accelerator_type is None:
            return [need] * (wanted.hosts_per_slice or 1)
        shape = slice_shape(wanted.accelerator_type, wanted.topology)
        chips = min(need["TPU"] * self._ask.workers, shape.chips_per_host)
        slots = chips / need["TPU"]
        return [{name: amount * slots for name, amount in need.items()}] * shape.hosts

    def _workers_per_group(self, hosts: int) -> int:
        wanted = self._ask.wanted
        if wanted.topology is None or wanted.accelerator_type is None:
            return hosts
        return slice_shape(wanted.accelerator_type, wanted.topology).workers(wanted.per_worker["TPU"])

    def _labels(self) -> dict[str, str]:
        wanted = self._ask.wanted
        labels = dict(wanted.labels)
        if wanted.topology is not None:
            labels[TPU_TOPOLOGY] = wanted.topology
        if wanted.accelerator_type is not None:
            labels[ACCELERATOR] = wanted.accelerator_type
        if self._known:
            labels[cluster.NODE_ID] = f"!in({','.join(sorted(self._known))})"
        return labels
