"""A reverse proxy between an operator and the API server: sees each request, and may spoil it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
from aiohttp import web

from everstep.testing.kube import ApiServer
from processes import LIMIT_S


class Request(NamedTuple):
    method: str
    path: str
    watching: bool
    body: Any


class Proxy:
    def __init__(
        self,
        server: ApiServer,
        folder: Path,
        kubeconfig: Path | None = None,
        note: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._server = server
        self._as = kubeconfig or server.kubeconfig
        self._note = note
        self.kubeconfig = folder / "through-the-proxy"

    async def answer(self, raw: web.Request, request: Request) -> web.StreamResponse:
        """What the client gets. For those who spoil it to override."""
        return await self.pass_on(raw)

    async def pass_on(self, raw: web.Request) -> web.StreamResponse:
        """As the server answers it, line by line: what it tells a watcher comes in lines."""
        async with self.ask(raw) as answer:
            back = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            with contextlib.suppress(ConnectionError):
                await back.prepare(raw)
                rest = b""
                async for chunk in answer.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        await back.write(self.answered(line) + b"\n")
                await back.write(self.answered(rest))
            return back

    def path_of(self, raw: web.Request) -> str:
        return raw.path_qs

    async def body_of(self, raw: web.Request) -> bytes:
        return await raw.read()

    def answered(self, line: bytes) -> bytes:
        return line

    @contextlib.asynccontextmanager
    async def ask(self, raw: web.Request) -> AsyncIterator[aiohttp.ClientResponse]:
        """The server itself."""
        headers = {k: v for k, v in raw.headers.items() if k.lower() not in ("host", "content-length")}
        async with self._session.request(
            raw.method,
            f"{self._server.url}{self.path_of(raw)}",
            headers=headers,
            data=await self.body_of(raw),
            ssl=self._trust,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            yield answer

    async def _handle(self, raw: web.Request) -> web.StreamResponse:
        body = await raw.read()
        watching = raw.query.get("watch") == "true"
        request = Request(raw.method, raw.path, watching, json.loads(body) if body else None)
        self._note(request)
        return await self.answer(raw, request)

    async def _serve(self, up: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._trust = ssl.create_default_context(cafile=str(self._server.certificate))
        async with aiohttp.ClientSession(auto_decompress=True) as self._session:
            app = web.Application(client_max_size=64 * 2**20)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._lead_here(runner.addresses[0][1])
            up.set()
            await self._stop.wait()
            await runner.cleanup()

    def _lead_here(self, port: int) -> None:
        config = json.loads(self._as.read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(json.dumps(config))

    @contextlib.contextmanager
    def serving(self) -> Iterator[Self]:
        up = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(up)), daemon=True)
        thread.start()
        assert up.wait(LIMIT_S)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(LIMIT_S)
