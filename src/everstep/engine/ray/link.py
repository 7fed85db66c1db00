"""The driver's line to one agent: orders out, words and heartbeats in, each as calls of its actor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from ray.exceptions import RayError

from everstep.engine.base import EngineRequest
from everstep.engine.heartbeats import Heartbeats
from everstep.engine.ray.clocks import HostClock
from everstep.engine.ray.upkeep import describe
from everstep.errors import AgentVersionError
from everstep.protocol import framing, wire
from everstep.topology.slices import HostId

_WAIT_S = 2.0


class LinkOwner(Protocol):
    """Who is told."""

    heartbeats: Heartbeats

    def heard(self, link: ActorLink, message: wire.AnyFromAgent) -> None: ...

    def lost(self, link: ActorLink, why: str) -> None: ...


class ActorLink:
    """A host whose agent we speak with."""

    def __init__(self, host: HostId, slice_name: str, actor: Any, owner: LinkOwner) -> None:
        self.host = host
        self.slice = slice_name
        self.actor = actor
        self.run = ""
        self.version = 0
        self.known = asyncio.Event()
        self.owner = (0, 0)
        self.accelerators: dict[str, list[str]] = {}
        self.session = 0
        self.clock = HostClock()
        self._owner = owner
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, ask: EngineRequest, driver: str) -> None:
        """Wait for the agent, and begin to listen."""
        pid, started, self.accelerators = await self.actor.hello.remote()
        self.owner = (pid, started)
        beat_s = ask.deadlines.heartbeat_interval_s
        self.session = await self.actor.attach.remote(ask.holder, ask.lease, beat_s, driver)
        await self._ask_for_a_beat()  # and so know its clock, before it speaks of times
        self._owner.heartbeats.watch(self.host)
        self._tasks = [
            asyncio.create_task(self._guard(self._listen)),
            asyncio.create_task(self._guard(lambda: self._poll_heartbeats(ask))),
        ]
        await asyncio.wait_for(self.known.wait(), ask.deadlines.heartbeat_timeout_s * 4)
        if self.version != wire.WIRE_VERSION:
            raise AgentVersionError(self.host, self.version, wire.WIRE_VERSION)

    def send(self, message: wire.AnyToAgent) -> None:
        self.actor.order.remote(self.session, framing.frame(message))

    async def _guard(self, body: Callable[[], Any]) -> None:
        try:
            await body()
        except RayError as error:
            self._owner.lost(self, f"its agent died ({type(error).__name__})")
        except Exception as error:  # a host that we can't listen to is of no more use than one that is gone
            self._owner.lost(self, f"what its agent says can't be read ({describe(error)})")

    async def _listen(self) -> None:
        frames = framing.Frames()
        after = 0
        while True:
            taken = await self.actor.words.remote(self.session, after, _WAIT_S)
            if isinstance(taken, str):
                self._owner.lost(self, taken)
                return
            after, data = taken
            if data:
                self._owner.heartbeats.heard(self.host)
            for body in frames.feed(data):
                message = wire.from_agent.decode(body)
                if isinstance(message, wire.Status):
                    self.run, self.version = message.run, message.version
                    self.known.set()
                self._owner.heard(self, message)

    async def _poll_heartbeats(self, ask: EngineRequest) -> None:
        """Ask at a steady pace, whether or not the last answer is in: on a busy machine Ray takes a second
        for one, and that isn't silence.
        """

        async def ask_once() -> None:
            if await self._ask_for_a_beat() < ask.deadlines.heartbeat_timeout_s:
                self._owner.heartbeats.heard(self.host)

        async with asyncio.TaskGroup() as questions:
            while True:
                questions.create_task(self._guard(ask_once))
                await asyncio.sleep(ask.deadlines.heartbeat_interval_s)

    async def _ask_for_a_beat(self) -> float:
        """How long ago the agent last said that it lives."""
        asked = time.monotonic()
        age, its_time = await self.actor.beat.remote(self.session)
        self.clock.answered(its_time, asked, time.monotonic())
        return float(age)

    def close(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks = []
