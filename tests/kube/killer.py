"""A reverse proxy in front of the API server that kills its client at a call of the test's choice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from aiohttp import web

from everstep.testing.kube import ApiServer
from processes import LIMIT_S


class Killer:
    """Counts an operator's calls, and kills it at one: before it is passed on, or before it is answered."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._server = server
        self.kubeconfig = folder / "through-the-killer"
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

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        await asyncio.to_thread(self._known.wait, LIMIT_S)
        # Nobody reads of events what to do next: to be killed at one is to be killed at the call before it.
        watching = request.query.get("watch") == "true" or request.path.endswith("/events")
        if not watching:
            self.calls.append(f"{request.method} {request.path}")
        mine = not watching and len(self.calls) == self._at
        if (mine and not self._answered) or (self.killed.is_set() and not watching):
            if not self.killed.is_set():
                self._kill()
            raise web.HTTPBadGateway()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        async with self._session.request(
            request.method,
            f"{self._server.url}{request.path_qs}",
            headers=headers,
            data=await request.read(),
            ssl=self._trust,
        ) as answer:
            if mine:
                await answer.read()
                self._kill()
                raise web.HTTPBadGateway()
            back = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            with contextlib.suppress(ConnectionError):
                await back.prepare(request)
                async for chunk in answer.content.iter_any():
                    await back.write(chunk)
            return back

    async def _serve(self, up: threading.Event, stop: asyncio.Event) -> None:
        self._trust = ssl.create_default_context(cafile=str(self._server.certificate))
        async with aiohttp.ClientSession(auto_decompress=True) as self._session:
            app = web.Application(client_max_size=64 * 2**20)
            app.router.add_route("*", "/{path:.*}", self._pass_on)
            runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._lead_here(runner.addresses[0][1])
            up.set()
            await stop.wait()
            await runner.cleanup()

    def _lead_here(self, port: int) -> None:
        config = json.loads(self._server.kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(json.dumps(config))

    @contextlib.contextmanager
    def serving(self) -> Iterator[Killer]:
        loop = asyncio.new_event_loop()
        stop, up = asyncio.Event(), threading.Event()
        thread = threading.Thread(target=loop.run_until_complete, args=(self._serve(up, stop),), daemon=True)
        thread.start()
        assert up.wait(LIMIT_S)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(LIMIT_S)
            loop.close()
