"""A port on loopback behind which the lighthouse is, wherever that may be now.

Workers get one address when they start. The lighthouse may die, and come back on another host: then only the
forwarders get its new address, and workers see a connection that broke, or one that took a little longer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from everstep.backend.network import join_address, listen

PATIENCE_S = 60.0
"""How long a connection may wait for a lighthouse to be there."""
_RETRY_S = 0.02
_READ = 1 << 16


class Forwarder:
    """Used from a running asyncio loop. The port stays the same until it is closed."""

    def __init__(self) -> None:
        sock = listen("127.0.0.1")
        self.address = join_address(*sock.getsockname()[:2])
        self._target = ""
        self._known = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        # Connections that come before the server is up wait in the socket's backlog.
        self._starting = asyncio.ensure_future(asyncio.start_server(self._accepted, sock=sock))

    def point_at(self, address: str) -> None:
        """``address``: where the lighthouse is now; empty: not known. Connections to where it was are cut."""
        if address == self._target:
            return
        self._target = address
        if address:
            self._known.set()
        else:
            self._known.clear()
        self._cut()

    def close(self) -> None:
        if self._starting.done():
            self._starting.result().close()
        self._starting.cancel()
        self._cut()

    def _cut(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                answers, there = await self._connect()
            await _until_either_ends(_copy(reader, there), _copy(answers, writer))
        except (TimeoutError, asyncio.CancelledError):
            pass  # cut, or nobody there: the worker's own patience decides what that means
        finally:
            self._connections.discard(task)
            for end in (writer, there):
                if end is not None:
                    end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            await self._known.wait()
            host, _, port = self._target.rpartition(":")
            try:
                return await asyncio.open_connection(host.strip("[]"), int(port))
            except OSError:
                await asyncio.sleep(_RETRY_S)  # it is being put back


async def _until_either_ends(*copies: asyncio.Future[None]) -> None:
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()


def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> asyncio.Future[None]:
    async def go() -> None:
        with suppress(OSError):  # one side is gone: so is the other, then
            while data := await reader.read(_READ):
                writer.write(data)
                await writer.drain()

    return asyncio.ensure_future(go())
