"""A proxy in front of the API server that kills its client at a call of the test's choice."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

from aiohttp import web

from everstep.testing.kube import ApiServer
from kube.proxy import Proxy, Request
from processes import LIMIT_S


class Killer(Proxy):
    """Counts an operator's calls, and kills it at one: before it is passed on, or before it is answered."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        super().__init__(server, folder)
        self.calls: list[str] = []
        self._at = 0
        self._answered = False
        self._victim: int | None = None
        self._known = threading.Event()
        self.killed = threading.Event()

    def aim(self, at: int, answered: bool) -> None:
        self.calls = []
        self._at, self._answered = at, answered
        self._victim = None
        self._known.clear()
        self.killed.clear()

    def at(self, pid: int | None) -> None:
        self._victim = pid
        self._known.set()

    def _kill(self) -> None:
        assert self._victim is not None
        os.kill(self._victim, signal.SIGKILL)
        self.killed.set()

    async def answer(self, raw: web.Request, request: Request) -> web.StreamResponse:
        await asyncio.to_thread(self._known.wait, LIMIT_S)
        # What changes nothing, and events, of which nobody reads what to do next: to be killed at one is to
        # be killed after the call before it.
        aside = request.method == "GET" or request.path.endswith("/events")
        if not aside:
            self.calls.append(f"{request.method} {request.path}")
        mine = not aside and len(self.calls) == self._at
        if (mine and not self._answered) or (self.killed.is_set() and not aside):
            if not self.killed.is_set():
                self._kill()
            raise web.HTTPBadGateway()
        if mine:
            async with self.ask(raw) as answer:
                await answer.read()
            self._kill()
            raise web.HTTPBadGateway()
        return await self.pass_on(raw)
