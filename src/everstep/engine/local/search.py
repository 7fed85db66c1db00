"""Finds agents on this machine, and connects to those that are new."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from everstep.engine.base import not_taken_over, waits_for
from everstep.engine.local.cluster import read_hosts
from everstep.engine.local.link import LocalLink
from everstep.errors import AgentVersionError
from everstep.protocol import wire

if TYPE_CHECKING:
    from everstep.engine.local.engine import LocalEngine

_POLL_S = 0.1


class HostSearch:
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._one_at_a_time = asyncio.Lock()

    async def keep_finding_hosts(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self._engine.find_hosts()

    async def connect_to_new(self, *, patiently: bool = False) -> None:
        """``patiently``: an earlier driver may have left some behind, whose agents are slow to answer."""
        async with self._one_at_a_time:
            there = read_hosts(self._engine.folder)
            # Gone for good, or back as another process under the same name.
            for host in [h for h, link in self._engine.dead.items() if there.get(h) != link.facts]:
                del self._engine.dead[host]
            known = self._engine.links.keys() | self._engine.dead.keys()
            new = [LocalLink(self._engine, facts) for host, facts in there.items() if host not in known]
            await asyncio.gather(*(self._connect(link, patiently) for link in new))

    async def _connect(self, link: LocalLink, patiently: bool) -> None:
        answers = False
        try:
            await link.connect()
            answers = await self._answers(link, patiently)
        except OSError:
            pass
        finally:
            if not answers:
                link.close()  # not up yet, stopped, or on its way out: look again
        if not answers:
            return
        link.alive = True
        self._engine.links[link.host] = link
        self._engine.heartbeats.watch(link.host)
        self._accept_or_refuse(link)

    async def _answers(self, link: LocalLink, patiently: bool) -> bool:
        """An agent that is connected lives, however long it is silent: its connection ends when it does."""
        request, limits = self._engine.request, self._engine.request.deadlines
        if await link.answers(limits.heartbeat_timeout_s):
            return True
        if not (patiently and link.connected and (self._engine.own is not None or link.host in request.left)):
            return False
        self._engine.sink.on_trouble(waits_for([link.host], limits))
        return await link.answers(limits.take_over_s - limits.heartbeat_timeout_s)

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
