"""The nodes of the cluster as hosts for this run: which are alive, which are suspect, which are
about to go.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from everstep.agent.host import DEFAULT_GRACE_S
from everstep.engine.ray import cluster
from everstep.topology.discovery import Machine, views
from everstep.topology.slices import HostId, HostView, SliceName, by_slice, whole_slices
from everstep.topology.wanted import Wanted

_SUSPECT_S = 20.0
"""How long a node that fell silent is left alone, unless Ray says sooner that it is gone: it takes 15 s."""

_ARRIVE_S = 600.0
"""How long the rest of a slice is waited for, before another one is asked for in its place."""


@dataclass(frozen=True)
class ClusterState:
    """What Ray reports at one time."""

    nodes: list[cluster.Node]
    available: dict[str, dict[str, float]]
    draining: dict[str, float]
    groups: dict[str, dict[str, Any]]
    """Placement groups of this run."""


def read_cluster(tag: str) -> ClusterState:
    return ClusterState(cluster.nodes(), cluster.available(), cluster.draining(), cluster.groups(tag))


class ClusterWatch:
    """What is known of the cluster's nodes, from the last state that was read."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.hosts: dict[HostId, HostView] = {}
        self.addresses: dict[HostId, str] = {}
        self._suspects: dict[HostId, float] = {}
        self._drains: dict[HostId, float] = {}
        self._since: dict[HostId, float] = {}
        """When a host was first seen; long ago for one that has been part of a whole slice."""

    def take(self, state: ClusterState, held: Collection[HostId]) -> None:
        """Take in the cluster's state of now. ``held``: the hosts that are ours."""
        self.addresses.update((node.id, node.address) for node in state.nodes)
        for node in state.nodes:
            if not node.alive or self._suspects.get(node.id, 0.0) < time.monotonic() - _SUSPECT_S:
                self._suspects.pop(node.id, None)
        ours = _held_by_node(state.groups)
        machines = [
            self._machine(
                node,
                state.available.get(node.id, {}),
                ours.get(node.id, {}),
                node.id in state.draining and node.id not in held,
            )
            for node in state.nodes
        ]
        self.hosts = {view.id: view for view in views(machines, self._wanted)}
        now = time.monotonic()
        self._since = {host: self._since.get(host, now) for host in self.hosts}
        self._since |= {
            host.id: -math.inf for found in whole_slices(self.hosts.values()) for host in found.hosts
        }

    def _machine(
        self, node: cluster.Node, free: dict[str, float], ours: dict[str, float], closed: bool
    ) -> Machine:
        names = {*free, *ours}
        usable = {n: min(node.total.get(n, 0), free.get(n, 0) + ours.get(n, 0)) for n in names}
        alive = node.alive and node.id not in self._suspects
        # Ray starts nothing new on a node that drains.
        free = {} if closed else usable
        return Machine(node.id, node.labels, node.total, free, alive, hostname=node.hostname)

    def members(self, name: SliceName) -> list[HostView]:
        """The living hosts of a slice, in order."""
        return [view for view in by_slice(self.hosts.values()).get(name, []) if view.alive]

    def is_alive(self, host: HostId) -> bool:
        view = self.hosts.get(host)
        return view is not None and view.alive

    def room(self) -> int:
        """How many workers the whole slices have room for."""
        return sum(found.slots for found in whole_slices(self.hosts.values()))

    def arriving(self) -> set[HostId]:
        """Hosts of slices that are on their way: the rest of each is yet to come. What a whole slice has
        left behind is not.
        """
        recent = time.monotonic() - _ARRIVE_S
        return {
            view.id
            for members in by_slice(self.hosts.values()).values()
            if sum(view.alive for view in members) < members[0].hosts_in_slice
            for view in members
            if view.alive and view.free and view.slots > 0 and self._since[view.id] > recent
        }

    def suspect(self, host: HostId) -> None:
        """It may be gone, or serve again once Ray has caught up."""
        self._suspects[host] = time.monotonic()

    # ------------------------------------------------------------------ nodes that are about to go

    def new_notices(
        self, state: ClusterState, held: Collection[HostId], late_s: float
    ) -> dict[HostId, float]:
        """Hosts of ours that drain, as was not known before, and in how many seconds they go. One that should
        have been gone for ``late_s`` is not going.
        """
        found = {}
        for host in held:
            deadline = state.draining.get(host)
            if deadline is None or self._drains.get(host) == deadline:
                continue
            self._drains[host] = deadline
            grace = deadline - time.time() if deadline else DEFAULT_GRACE_S
            if grace > -late_s:
                found[host] = grace
        return found

    def forget_notice(self, host: HostId) -> None:
        self._drains.pop(host, None)


def _held_by_node(groups: dict[str, dict[str, Any]]) -> dict[HostId, dict[str, float]]:
    """What this run's own placement groups hold, by node: it is free for us."""
    found: dict[HostId, dict[str, float]] = {}
    for record in groups.values():
        for i, node in record.get("bundles_to_node_id", {}).items():
            holding = found.setdefault(node, {})
            for name, amount in record["bundles"][i].items():
                holding[name] = holding.get(name, 0) + amount
    return found
