"""The driver's connection to one agent: orders out, messages and heartbeats in, each as calls of
its actor.
"""

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
    """What a link needs of the engine: it passes messages on, and reports that its agent is lost."""

    heartbeats: Heartbeats

    def received(self, link: ActorLink, message: wire.AnyFromAgent) -> None: ...

    def lost(self, link: ActorLink, why: str) -> None: ...


class ActorLink:
    """A host that the engine is connected to."""

    def __init__(self, host: HostId, slice_name: str, actor: Any, engine: LinkOwner) -> None:
        self.host = host
        self.slice = slice_name
        self.actor = actor
        self.run = ""
        self.version = 0
        self.known = asyncio.Event()
        self.actor_process = (0, 0)
        """(pid, start time): an agent that nobody holds leaves once it has ended."""
        self.accelerators: dict[str, list[str]] = {}
        self.session = 0
        self.clock = HostClock()
        self._engine = engine
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, request: EngineRequest, driver: str) -> None:
        """Wait for the agent, and begin to listen."""
        pid, started, self.accelerators = await self.actor.hello.remote()
        self.actor_process = (pid, started)
        beat_s = request.deadlines.heartbeat_interval_s
        self.session = await self.actor.attach.remote(request.holder, request.lease, beat_s, driver)
        await self._ask_for_a_beat()  # to know its clock before messages with times of it come
        self._engine.heartbeats.watch(self.host)
        self._tasks = [
            asyncio.create_task(self._guard(self._listen)),
            asyncio.create_task(self._guard(lambda: self._poll_heartbeats(request))),
        ]
        await asyncio.wait_for(self.known.wait(), request.deadlines.heartbeat_timeout_s * 4)
        if self.version != wire.WIRE_VERSION:
            raise AgentVersionError(self.host, self.version, wire.WIRE_VERSION)

    def send(self, message: wire.AnyToAgent) -> None:
        self.actor.order.remote(self.session, framing.frame(message))

    async def _guard(self, body: Callable[[], Any]) -> None:
        try:
            await body()
        except RayError as error:
            self._engine.lost(self, f"its agent died ({type(error).__name__})")
        except Exception as error:  # a host that we can't listen to is of no more use than one that is gone
            self._engine.lost(self, f"what its agent says can't be read ({describe(error)})")

    async def _listen(self) -> None:
        frames = framing.Frames()
        after = 0
        while True:
            taken = await self.actor.words.remote(self.session, after, _WAIT_S)
            if isinstance(taken, str):
                self._engine.lost(self, taken)
                return
            after, data = taken
            if data:
                self._engine.heartbeats.received(self.host)
            for body in frames.feed(data):
                message = wire.from_agent.decode(body)
                if isinstance(message, wire.Status):
                    self.run, self.version = message.run, message.version
                    self.known.set()
                self._engine.received(self, message)

    async def _poll_heartbeats(self, request: EngineRequest) -> None:
        """Ask at a steady pace, whether or not the last answer is in: on a busy machine Ray takes a second
        for one, and that isn't silence.
        """

        async def ask_once() -> None:
            if await self._ask_for_a_beat() < request.deadlines.heartbeat_timeout_s:
                self._engine.heartbeats.received(self.host)

        async with asyncio.TaskGroup() as questions:
            while True:
                questions.create_task(self._guard(ask_once))
                await asyncio.sleep(request.deadlines.heartbeat_interval_s)

    async def _ask_for_a_beat(self) -> float:
        """How long ago the agent's last heartbeat was."""
        asked = time.monotonic()
        age, its_time = await self.actor.beat.remote(self.session)
        self.clock.answered(its_time, asked, time.monotonic())
        return float(age)

    def close(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks = []
