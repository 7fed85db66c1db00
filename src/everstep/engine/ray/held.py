"""Slices that this run holds on the cluster, and the links to the agents in them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from everstep.engine.ray.link import ActorLink
from everstep.topology.slices import HostId, HostView, SliceName


@dataclass
class HeldSlice:
    """A slice that is ours, or is about to be."""

    name: SliceName
    hosts: tuple[HostId, ...]
    slots: tuple[int, ...]
    per_worker: dict[str, float]
    group_name: str
    """The name of its placement group, unique for all time."""
    making: asyncio.Future[Any] | None = None
    """What a thread is making for it just now, which can only be waited for, not cancelled."""
    links: dict[HostId, ActorLink] = field(default_factory=dict)

    def holds(self, host: HostId) -> dict[str, float]:
        slots = self.slots[self.hosts.index(host)] if host in self.hosts else 0
        return {name: amount * slots for name, amount in self.per_worker.items()}

    def actor_name(self, host: HostId) -> str:
        return f"{self.group_name}/{host}"


class HeldSlices:
    """By name, and by host."""

    def __init__(self) -> None:
        self._by_name: dict[SliceName, HeldSlice] = {}

    def __iter__(self) -> Iterator[HeldSlice]:
        return iter(self._by_name.values())

    def add(self, held: HeldSlice) -> None:
        self._by_name[held.name] = held

    def take(self, names: tuple[SliceName, ...]) -> list[HeldSlice]:
        """These are no longer held."""
        return [self._by_name.pop(name) for name in names if name in self._by_name]

    def names(self) -> tuple[SliceName, ...]:
        return tuple(self._by_name)

    def actor_name(self, host: HostId) -> str:
        """Empty: it isn't ours any more."""
        return next((held.actor_name(host) for held in self if host in held.links), "")

    def hosts(self) -> list[HostId]:
        return sorted(host for held in self for host in held.links)

    def links(self) -> list[ActorLink]:
        return [link for held in self for link in held.links.values()]

    def link(self, host: HostId) -> ActorLink | None:
        return next((held.links[host] for held in self if host in held.links), None)

    def has(self, link: ActorLink) -> bool:
        """Whether this is still the host's link, and not one that was given up."""
        held = self._by_name.get(link.slice)
        return held is not None and held.links.get(link.host) is link

    def drop(self, link: ActorLink) -> None:
        del self._by_name[link.slice].links[link.host]

    def as_reserved(self, view: HostView) -> HostView:
        """A lone host that we hold has room for what we have reserved there, and no more."""
        held = self._by_name.get(view.slice)
        if held is None or view.id not in held.links:
            return view
        return msgspec.structs.replace(view, slots=held.slots[held.hosts.index(view.id)], free=True)
