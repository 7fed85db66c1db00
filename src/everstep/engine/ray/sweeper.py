"""An actor that cleans up after a run whose driver died and never came back.

One detached actor a run, made before anything is reserved. It needs no CPU, and Ray starts it again when its
node dies. It leaves a node that drains, which would otherwise wait for it to the end. Once no driver has
pinged it for the run's orphan time-out, it removes every actor and every placement group of the run, and then
itself.

It also ends agents that don't answer, for a driver that has not been replaced: a later driver pings it before
it takes anything over, so the sweeper knows whose they are.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.engine.ray import cluster
from everstep.engine.ray.upkeep import OffLoop

_POLL_S = 1.0


class Sweeper:
    def __init__(self, tag: str, orphan_s: float) -> None:
        self._tag = tag
        self._orphan_s = orphan_s
        self._lease = 0
        self._began = self._heard = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def hear(self, orphan_s: float, lease: int) -> str:
        """A driver of the run lives. Returns the node that this actor is on."""
        self._orphan_s = orphan_s
        self._lease = max(self._lease, lease)
        self._heard = time.monotonic()
        return cluster.this_node()

    def end(self, lease: int, agents: list[str], groups: list[str]) -> bool:
        """End these, which don't answer. False: the driver was replaced, and its order doesn't count."""
        if lease < self._lease:
            return False
        if time.monotonic() - self._began < 2 * greeting_pause(self._orphan_s):
            raise RuntimeError("a later driver may live, and not have pinged this sweeper yet")
        for name in agents:
            cluster.kill(name)
        for group in groups:
            cluster.remove_named(group)
        return True

    def leave(self, lease: int) -> None:
        """A driver knows that nothing of the run is left: end this actor."""
        if lease >= self._lease:
            cluster.kill(name_of(self._tag))

    def pid(self) -> int:
        return os.getpid()

    def _watch(self) -> None:
        while time.monotonic() - self._heard < self._orphan_s:
            time.sleep(min(_POLL_S, self._orphan_s / 4))
        me = name_of(self._tag)
        while not cluster.sweep(self._tag, but=me):
            time.sleep(_POLL_S)
        cluster.kill(me)


def greeting_pause(orphan_s: float) -> float:
    """How often drivers ping it."""
    return min(5.0, orphan_s / 10)


def name_of(tag: str) -> str:
    return f"{tag}sweeper"


class SweeperClient:
    """The driver's connection to its run's sweeper, which is made where there is none."""

    def __init__(self, tag: str, orphan_s: float, lease: int, off_loop: OffLoop) -> None:
        self._tag = tag
        self._lease = lease
        self._orphan_s = orphan_s
        self._off_loop = off_loop
        self._sweeper: Any = None

    def pause(self) -> float:
        return greeting_pause(self._orphan_s)

    async def ping(self) -> str:
        """Let it know that a driver lives. Returns the node that it is on."""
        if self._sweeper is None:
            self._sweeper = await self._off_loop(self._make)
        node: str
        try:
            node = await self._sweeper.hear.remote(self._orphan_s, self._lease)
        except (RayError, TypeError) as error:
            if isinstance(error, TypeError):  # an earlier version of Everstep has made it
                await self._off_loop(cluster.kill, name_of(self._tag))
            self._sweeper = await self._off_loop(self._make)
            node = await self._sweeper.hear.remote(self._orphan_s, self._lease)
        return node

    async def keep(self) -> None:
        """Ping it. If its node is about to go, end it, and make and ping another one at once."""
        node = await self.ping()
        if await self._off_loop(_should_leave, node):
            await self._off_loop(cluster.kill, name_of(self._tag))
            self._sweeper = None
            await self.ping()

    def _make(self) -> Any:
        # Here first: of this node it is known that it lives.
        here = NodeAffinitySchedulingStrategy(cluster.this_node(), soft=True)
        return (
            ray.remote(Sweeper)
            .options(
                name=name_of(self._tag),
                namespace=cluster.NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                # One byte: Ray puts an actor that asks for nothing on any node, wherever it should rather be.
                memory=1,
                scheduling_strategy=here,
                max_restarts=-1,
                max_task_retries=-1,
            )
            .remote(self._tag, self._orphan_s)
        )


def _should_leave(node: str) -> bool:
    """Its node is about to go, and ours isn't."""
    draining = cluster.draining()
    return node in draining and cluster.this_node() not in draining
