"""What an earlier driver of the run left on the cluster: slices whose agents answer, and the rest."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import ray

from everstep.engine.base import not_taken_over
from everstep.engine.ray import cluster
from everstep.engine.ray.endings import NobodyAnswersError, end_slice
from everstep.engine.ray.held import HeldSlice
from everstep.engine.ray.link import ActorLink
from everstep.engine.ray.reservations import ReservationOwner, per_worker
from everstep.errors import AgentVersionError
from everstep.topology.slices import HostId


class Leftovers(NamedTuple):
    kept: list[HeldSlice]
    silent: list[str]
    """Placement groups that can't be removed yet: nobody says whose their agents are."""


async def find_what_is_left(engine: ReservationOwner, tag: str) -> Leftovers:
    """Whole slices whose agents answer and hold this run are kept; all else with our tag is removed, unless a
    later driver has made it.
    """
    names = await engine.off_loop(cluster.actors, tag)
    reserved = await engine.off_loop(cluster.groups, tag)
    agents: dict[str, dict[HostId, str]] = {}
    for name in names:
        group, _, host = name.rpartition("/")
        agents.setdefault(group, {})[host] = name
    left = Leftovers([], [])
    for record in reserved.values():
        held = _recall(engine, tag, record)
        there = agents.get(record["name"], {})
        if held is not None and set(there) == set(held.hosts) and await _reconnect(engine, held, there):
            left.kept.append(held)
        elif cluster.lease_of(tag, record["name"]) <= engine.request.lease:
            try:
                await engine.off_loop(end_slice, tag, engine.request.lease, record["name"])
            except NobodyAnswersError:
                left.silent.append(record["name"])
    return left


def _recall(engine: ReservationOwner, tag: str, record: dict[str, Any]) -> HeldSlice | None:
    """A slice, from the record of its placement group."""
    prefix, _, slice_name = record["name"].removeprefix(tag).partition("/")
    if not slice_name or prefix == "demand" or record["state"] != "CREATED":
        return None
    needs = per_worker(engine.request)
    bundles, nodes = record["bundles"], record["bundles_to_node_id"]
    slots = [
        int(min((bundles[i].get(name, 0) / amount for name, amount in needs.items()), default=1))
        for i in sorted(bundles)
    ]
    hosts = tuple(nodes[i] for i in sorted(nodes))
    return HeldSlice(slice_name, hosts, tuple(slots), needs, record["name"])


async def _reconnect(engine: ReservationOwner, held: HeldSlice, agents: dict[HostId, str]) -> bool:
    request = engine.request
    try:
        for host, name in agents.items():
            actor = await engine.off_loop(ray.get_actor, name, cluster.NAMESPACE)
            held.links[host] = ActorLink(host, held.name, actor, engine)
        async with asyncio.timeout(max(5.0, request.deadlines.heartbeat_timeout_s * 4)):
            await asyncio.gather(*(link.connect(request, engine.whoami()) for link in held.links.values()))
    except Exception as error:  # gone, silent, or of another version: it is not what we could go on with
        for link in held.links.values():
            engine.unlink(link)
        if isinstance(error, AgentVersionError):
            engine.sink.on_trouble(not_taken_over(error.message))
        return False
    return all(link.run == request.holder for link in held.links.values())
