"""A store for code that must not block: the driver's event loop, real or simulated.

What is kept in storage, and in which order it is written, is coded once, as coroutines over ``AsyncStore``.
In production each call runs on a thread of its own (``ThreadedStore``). Code without an event loop runs the
same coroutines over ``ImmediateStore``, whose calls never suspend, with ``complete``. The simulator has a
store of its own, in virtual time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from everstep.errors import StorageError
from everstep.storage.store import FileRecord, Limits, Store

Found = TypeVar("Found")


class AsyncStore(Protocol):
    """A ``Store`` (see there) whose calls are awaited. Every call ends within a deadline."""

    @property
    def is_local(self) -> bool: ...

    def address(self, key: str = "") -> str: ...

    def child(self, prefix: str) -> AsyncStore: ...

    async def create(self, key: str, data: bytes) -> bool: ...

    async def read(self, key: str) -> bytes | None: ...

    async def exists(self, key: str) -> bool: ...

    async def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]: ...

    async def folders(self, prefix: str = "") -> Sequence[str]: ...

    async def delete(self, keys: Iterable[str]) -> None: ...

    async def clear(self, prefix: str) -> None: ...

    async def call(self, work: Callable[[Store], Found], size: int = 0) -> Found:
        """Several calls at once, as one step. ``size``: the bytes that it reads or writes."""
        ...


class ThreadedStore:
    """Each call has a daemon thread: one that hangs holds up neither the event loop nor the interpreter's
    exit.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits

    @property
    def is_local(self) -> bool:
        return self._store.is_local

    def address(self, key: str = "") -> str:
        return self._store.address(key)

    def child(self, prefix: str) -> ThreadedStore:
        return ThreadedStore(self._store.child(prefix), self._limits)

    async def create(self, key: str, data: bytes) -> bool:
        return await self.call(lambda store: store.create(key, data), len(data))

    async def read(self, key: str) -> bytes | None:
        return await self.call(lambda store: store.read(key))

    async def exists(self, key: str) -> bool:
        return await self.call(lambda store: store.exists(key))

    async def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]:
        return await self.call(lambda store: store.list(prefix, after))

    async def folders(self, prefix: str = "") -> Sequence[str]:
        return await self.call(lambda store: store.folders(prefix))

    async def delete(self, keys: Iterable[str]) -> None:
        named = [*keys]
        await self.call(lambda store: store.delete(named))

    async def clear(self, prefix: str) -> None:
        await self.call(lambda store: store.clear(prefix))

    async def call(self, work: Callable[[Store], Found], size: int = 0) -> Found:
        # The store's own deadline comes first. This one is for a file system that never answers.
        limit_s = self._limits.transfer_s(size) + self._limits.answer_s
        try:
            async with asyncio.timeout(limit_s):
                return await _on_a_thread(lambda: work(self._store))
        except TimeoutError:
            raise StorageError(
                f"{self.address()} has not answered for {limit_s:.0f} s",
                "look at the disk or the network; a later attempt may succeed",
            ) from None


class ImmediateStore:
    """Calls block, and never suspend the coroutine that makes them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def is_local(self) -> bool:
        return self._store.is_local

    def address(self, key: str = "") -> str:
        return self._store.address(key)

    def child(self, prefix: str) -> ImmediateStore:
        return ImmediateStore(self._store.child(prefix))

    async def create(self, key: str, data: bytes) -> bool:
        return self._store.create(key, data)

    async def read(self, key: str) -> bytes | None:
        return self._store.read(key)

    async def exists(self, key: str) -> bool:
        return self._store.exists(key)

    async def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]:
        return self._store.list(prefix, after)

    async def folders(self, prefix: str = "") -> Sequence[str]:
        return self._store.folders(prefix)

    async def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(keys)

    async def clear(self, prefix: str) -> None:
        self._store.clear(prefix)

    async def call(self, work: Callable[[Store], Found], size: int = 0) -> Found:
        return work(self._store)


def complete(coroutine: Coroutine[Any, Any, Found]) -> Found:
    """Run a coroutine over an ``ImmediateStore`` to its end, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        found: Found = stop.value
        return found
    coroutine.close()
    raise AssertionError("a coroutine over an ImmediateStore must not wait for anything else")


async def _on_a_thread(work: Callable[[], Found]) -> Found:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Found] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():  # else nobody waits for it any more
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # handed to the coroutine that awaits it
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop has closed meanwhile

    threading.Thread(target=run, name="everstep-storage", daemon=True).start()
    return await future
