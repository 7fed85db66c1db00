"""Finds agents on this machine, and connects to those that are new."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from everstep.engine.base import not_taken_over
from everstep.engine.local.cluster import read_hosts
from everstep.engine.local.link import LocalLink
from everstep.errors import AgentVersionError
from everstep.protocol import wire

if TYPE_CHECKING:
    from everstep.engine.local.engine import LocalEngine


class HostSearch:
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._one_at_a_time = asyncio.Lock()

    async def connect_to_new(self) -> None:
        async with self._one_at_a_time:
            await self._connect_to_new()

    async def _connect_to_new(self) -> None:
        there = read_hosts(self._engine.folder)
        # Gone for good, or back as another process under the same name.
        for host in [h for h, link in self._engine.dead.items() if there.get(h) != link.facts]:
            del self._engine.dead[host]
        for host, facts in there.items():
            if host not in self._engine.links and host not in self._engine.dead:
                link = LocalLink(self._engine, facts)
                try:
                    await link.connect()
                    self._engine.links[host] = link
                    await asyncio.wait_for(
                        link.known.wait(), self._engine.request.deadlines.heartbeat_timeout_s
                    )
                except (OSError, TimeoutError):
                    self._engine.links.pop(host, None)
                    link.close()  # not up yet, or on its way out: look again
                else:
                    self._accept_or_refuse(link)

    def _accept_or_refuse(self, link: LocalLink) -> None:
        """Whether this driver can have the host."""
        engine = self._engine
        if link.version != wire.WIRE_VERSION:
            error = AgentVersionError(link.host, link.version, wire.WIRE_VERSION)
            self._refuse(link, error.message)
            if engine.own is None:
                raise error  # it is the user's
        elif engine.own is not None and link.run not in ("", engine.request.holder):
            self._refuse(link, "the run's journal was removed since they were started")

    def _refuse(self, link: LocalLink, why: str) -> None:
        """Of an agent that an earlier driver of this run left behind: it is ended when this machine is used,
        like one that is silent.
        """
        engine = self._engine
        engine.heartbeats.forget(link.host)
        engine.dead[link.host] = engine.links.pop(link.host)
        link.alive = False
        link.close()
        if link.run and engine.own is not None:
            engine.sink.on_trouble(not_taken_over(why))
