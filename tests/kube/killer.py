"""A reverse proxy in front of the API server that kills its client at a call of the test's choice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import aiohttp
from aiohttp import web

from everstep.testing.kube import ApiServer
from processes import LIMIT_S

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["everstep.cli.operator", "everstep.kube.webhook", "everstep.kube.neighbours"]
)


def _everstep(arguments: list[str], out: str, errors: str) -> None:
    from everstep.cli.operator import operator

    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    operator(arguments)


def everstep(*arguments: str, kubeconfig: Path | str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``everstep operator …``, as quick as an operator. What it said is in the folder, too."""
    out, errors = (Path(tempfile.mkdtemp(dir=folder), name) for name in ("out", "errors"))
    words = [*arguments, "--kubeconfig", str(kubeconfig)]
    process = _CONTEXT.Process(target=_everstep, args=(words, str(out), str(errors)), daemon=True)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode is not None, errors.read_text()
    return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), errors.read_text())


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """The process that quick operators are forked from. It is there when this has returned."""
    first = _CONTEXT.Process(target=os.getpid)
    first.start()
    first.join()
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


class QuickOperator:
    """An operator that is there in no time: forked from a process that has imported all of it."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path) -> None:
        words = ["run", "-v", "--kubeconfig", str(kubeconfig), "--namespace", namespace]
        self.process = _CONTEXT.Process(target=_everstep, args=(words, str(log), str(log)), daemon=True)
        self.process.start()

    def stop(self) -> None:
        if self.process.is_alive():
            assert self.process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)
        self.process.join(LIMIT_S)
        assert self.process.exitcode is not None


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
