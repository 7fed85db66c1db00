"""The one that cleans up after a run keeps no node from leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.engine.ray import cluster as known
from everstep.engine.ray.sweeper import Sweeper, SweeperClient, name_of
from everstep.engine.ray.upkeep import OffLoop

from .cluster import RayCluster

ORPHAN_S = 600.0


def kept(tag: str) -> str:
    """The node that the run's sweeper is on, after its driver has looked after it."""

    async def once() -> str:
        off_loop = OffLoop()
        line = SweeperClient(tag, ORPHAN_S, 1, off_loop)
        await line.keep()
        off_loop.close()
        node: str = await ray.get_actor(name_of(tag), namespace=known.NAMESPACE).hear.remote(ORPHAN_S, 1)
        return node

    return asyncio.run(once())


def put_on(node: str, tag: str) -> Any:
    return (
        ray.remote(Sweeper)
        .options(
            name=name_of(tag),
            namespace=known.NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(tag, ORPHAN_S)
    )


def test_it_is_where_the_driver_is_and_leaves_a_node_that_drains(cluster: RayCluster) -> None:
    here, there = known.this_node(), cluster.add_lone_host("slice-0")
    tags = [known.tag_of(f"run-{number}") for number in range(3)]
    try:
        assert {kept(tag) for tag in tags[1:]} == {here}
        assert ray.get(put_on(there, tags[0]).hear.remote(ORPHAN_S, 1)) == there
        assert kept(tags[0]) == there, "of a node that stays, it is left where it is"
        cluster.drain(there, ORPHAN_S)
        assert kept(tags[0]) == here
    finally:
        for tag in tags:
            known.kill(name_of(tag))
