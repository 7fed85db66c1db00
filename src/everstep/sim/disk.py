"""The simulated store: one set of objects, and what each process sees of it.

A request takes effect at one instant between its sending and its answer, or, where no answer comes, at some
time after that, or never. The death of who sent it changes nothing about that.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from everstep.errors import DamagedCheckpointError, StorageError
from everstep.sim.time import Process
from everstep.storage.store import FileRecord, Store

Found = TypeVar("Found")

ANSWER_S = 60.0
"""After which a request without an answer fails."""


@dataclass
class Lag:
    """Of what is listed behind what is there. Reads are of now."""

    made_s: float = 0.0
    """For this long, lists lack what was made."""
    gone_s: float = 0.0
    """For this long, lists have what was deleted."""


class Watcher(Protocol):
    """Gets every change, and the drivers that believe to have made one."""

    def appending(self, process: str, key: str, data: bytes) -> None: ...

    def appended(self, process: str, key: str) -> None: ...

    def created(self, key: str, data: bytes) -> None: ...

    def deleting(self, key: str) -> None: ...


@dataclass
class Disk:
    """What is stored."""

    rng: random.Random
    now: Callable[[], float] = lambda: 0.0
    objects: dict[str, bytes] = field(default_factory=dict)
    watcher: Watcher | None = None
    full: bool = False
    bytes_per_s: float = 1e12
    lag: Lag = field(default_factory=Lag)
    _keys: list[str] = field(default_factory=list)
    """Sorted."""
    _made: dict[str, float] = field(default_factory=dict)
    """When each was made."""
    _gone: dict[str, tuple[float, int]] = field(default_factory=dict)
    """What was deleted: when, and its size."""

    def create(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return self.objects[key] == data
        if self.full:
            raise StorageError(f"no space left for {key}", "free some, or keep fewer checkpoints")
        self.objects[key] = data
        self._made[key] = self.now()
        self._gone.pop(key, None)
        bisect.insort(self._keys, key)
        if self.watcher is not None:
            self.watcher.created(key, data)
        return True

    def delete(self, key: str) -> None:
        if key in self.objects:
            if self.watcher is not None:
                self.watcher.deleting(key)
            self.lose(key)

    def lose(self, key: str) -> None:
        self._gone[key] = (self.now(), len(self.objects.pop(key)))
        del self._keys[bisect.bisect_left(self._keys, key)]

    def below(self, prefix: str) -> list[str]:
        """What begins so, in order."""
        first = bisect.bisect_left(self._keys, prefix)
        return self._keys[first : bisect.bisect_left(self._keys, prefix + "\uffff")]

    def listed(self, prefix: str) -> dict[str, int]:
        """What a list of what begins so has, with sizes."""
        objects = self.objects
        found = {key: len(objects[key]) for key in self.below(prefix)}
        if self.lag.made_s or self.lag.gone_s:
            made, gone = self.now() - self.lag.made_s, self.now() - self.lag.gone_s
            found = {key: size for key, size in found.items() if self._made[key] <= made}
            found |= {k: n for k, (at, n) in self._gone.items() if at > gone and k.startswith(prefix)}
            return dict(sorted(found.items()))
        return found


@dataclass(frozen=True)
class View:
    """A ``Store`` on the disk, without delays or faults."""

    disk: Disk
    prefix: str = ""

    is_local = False

    def address(self, key: str = "") -> str:
        return "sim://" + (self.prefix + key).rstrip("/")

    def child(self, prefix: str) -> View:
        return View(self.disk, f"{self.prefix}{prefix}/")

    def create(self, key: str, data: bytes) -> bool:
        return self.disk.create(self.prefix + key, data)

    def read(self, key: str) -> bytes | None:
        return self.disk.objects.get(self.prefix + key)

    def exists(self, key: str) -> bool:
        return self.prefix + key in self.disk.objects

    def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]:
        whole = self.prefix + (f"{prefix}/" if prefix else "")
        start = len(self.prefix)
        found = [(path[start:], size) for path, size in self.disk.listed(whole).items()]
        return [FileRecord(key, size, "") for key, size in found if key > after]

    def folders(self, prefix: str = "") -> Sequence[str]:
        whole = self.prefix + (f"{prefix}/" if prefix else "")
        start = len(whole)
        return sorted({key[start:].split("/")[0] for key in self.disk.listed(whole) if "/" in key[start:]})

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.disk.delete(self.prefix + key)

    def clear(self, prefix: str) -> None:
        for key in self.disk.below(f"{self.prefix}{prefix}/"):
            self.disk.delete(key)

    def digest(self, key: str) -> FileRecord | None:
        data = self.read(key)
        return None if data is None else FileRecord(key, len(data), hashlib.sha256(data).hexdigest())

    def replace(self, key: str, data: bytes) -> None:
        raise AssertionError("no driver overwrites anything")

    def upload(self, source: Path, key: str, owner: str, beside: int = 0) -> FileRecord | None:
        raise DamagedCheckpointError(key, key, "is not uploaded in a simulation")

    def download(self, key: str, target: Path, *_: Any, **__: Any) -> FileRecord:
        raise DamagedCheckpointError(key, key, "is not downloaded in a simulation")


@dataclass
class Network:
    """Between one process and the store."""

    rng: random.Random
    cut_until: float = 0.0
    trouble: float = 0.0
    """How likely it is that a request gets no answer."""
    slowest: float = 2.0
    """Seconds that one in a hundred may take longer than the others."""


@dataclass(frozen=True)
class SimStore:
    """An ``AsyncStore`` (see there), as one process sees it."""

    process: Process
    network: Network
    view: View

    is_local = False

    def address(self, key: str = "") -> str:
        return self.view.address(key)

    def child(self, prefix: str) -> SimStore:
        return SimStore(self.process, self.network, self.view.child(prefix))

    async def create(self, key: str, data: bytes) -> bool:
        watcher, path = self.view.disk.watcher, self.view.prefix + key
        assert watcher is not None
        watcher.appending(self.process.name, path, data)
        created = await self._request(lambda: self.view.create(key, data), len(data))
        if created:
            watcher.appended(self.process.name, path)
        return created

    async def read(self, key: str) -> bytes | None:
        return await self._request(lambda: self.view.read(key))

    async def exists(self, key: str) -> bool:
        return await self._request(lambda: self.view.exists(key))

    async def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]:
        return await self._request(lambda: self.view.list(prefix, after))

    async def folders(self, prefix: str = "") -> Sequence[str]:
        return await self._request(lambda: self.view.folders(prefix))

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:  # stores don't delete many objects at one instant
            await self._request(lambda key=key: self.view.delete([key]))  # type: ignore[misc]

    async def clear(self, prefix: str) -> None:
        for file in await self.list(prefix):
            await self.delete([file.path])

    async def call(self, work: Callable[[Store], Found], size: int = 0) -> Found:
        return await self._request(lambda: work(self.view), size)

    async def _request(self, effect: Callable[[], Found], size: int = 0) -> Found:
        future = self.process.loop.create_future()
        rng, time = self.network.rng, self.process.time
        answer_after = rng.uniform(0.001, 0.05) + size / self.view.disk.bytes_per_s
        if rng.random() < 0.01:
            answer_after += rng.uniform(0.1, self.network.slowest)
        away = self.network.cut_until - time.now
        if away > 0 or rng.random() < self.network.trouble or answer_after > ANSWER_S:
            self._without_answer(effect, future, away)
        else:
            takes = partial(self._take_effect, effect, future, answer_after)
            time.after(rng.uniform(0.0, answer_after), takes)
        found: Found = await future
        return found

    def _take_effect(self, effect: Callable[[], Found], future: asyncio.Future[Any], rest: float) -> None:
        try:
            found, error = effect(), None
        except StorageError as raised:
            found, error = None, raised
        self.process.later(rest, partial(_settle, future, found, error))

    def _without_answer(self, effect: Callable[[], Found], future: asyncio.Future[Any], away: float) -> None:
        rng, time = self.network.rng, self.process.time
        fate = rng.random()
        if fate < 0.5:  # it arrives all the same: now, or when the network is back, or much later
            when = rng.choice([rng.uniform(0.0, 1.0), max(0.0, away), rng.uniform(0.0, 150.0)])
            time.after(when, lambda: self._silently(effect))
        fails_after = rng.choice([rng.uniform(0.1, 5.0), ANSWER_S])
        error = StorageError("no answer from the store")
        self.process.later(fails_after, lambda: _settle(future, None, error))

    @staticmethod
    def _silently(effect: Callable[[], Found]) -> None:
        try:
            effect()
        except StorageError:
            pass  # the answer is lost


def _settle(future: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)
