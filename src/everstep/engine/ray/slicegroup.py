"""How a slice is reserved: one placement group with a bundle on each of its nodes, and an actor in each."""

from __future__ import annotations

from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from everstep.engine.base import EngineRequest
from everstep.engine.ray import cluster
from everstep.engine.ray.actor import HostActor
from everstep.engine.ray.held import HeldSlice


def make_group(held: HeldSlice) -> PlacementGroup:
    return placement_group(
        [held.holds(host) for host in held.hosts],
        strategy="STRICT_SPREAD",
        name=held.group_name,
        lifetime="detached",
        bundle_label_selector=[{cluster.NODE_ID: host} for host in held.hosts],
    )


def make_actor(request: EngineRequest, held: HeldSlice, group: PlacementGroup, index: int) -> Any:
    host = held.hosts[index]
    holds = held.holds(host)
    lock = f"y{cluster.short_digest(f'{request.run} {host}')}.lock"
    options: dict[str, Any] = {
        "num_cpus": holds.pop("CPU", 0),
        "num_gpus": holds.pop("GPU", 0),
        "memory": holds.pop("memory", None),
        "resources": holds,
    }
    if request.runtime_env:
        options["runtime_env"] = dict(request.runtime_env)
    folder = f"y{cluster.short_digest(f'{held.group_name} {host}')}"
    remote: Any = HostActor
    return remote.options(
        name=held.actor_name(host),
        namespace=cluster.NAMESPACE,
        lifetime="detached",
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        **options,
    ).remote(host, folder, lock)
