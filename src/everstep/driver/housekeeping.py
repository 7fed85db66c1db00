"""What a driver does again and again while it lives: it makes the journal durable, keeps it short, and looks
at the run's folder.

Each of these waits for its own last call and for no other, so that a slow one doesn't pile up or hold up the
rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from everstep.control.controller import Controller
from everstep.deadlines import Deadlines
from everstep.driver.uncommitted import Uncommitted
from everstep.errors import StorageError
from everstep.journal import records
from everstep.journal.history import History
from everstep.journal.journal import Journal, JournalRemovedError
from everstep.journal.lease import stop_request
from everstep.process.clock import Clock
from everstep.protocol import wire
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.checkpoints import MANIFEST
from everstep.topology.slices import HostId

FLUSH_S = 0.2
_LOOK_S = 2.0
_IDLE_S = 1.0
"""How often to check without an event: warnings are due by time, and some news make no event."""
_COMPACT_AGAIN_S = 60.0


class Housekeeping:
    def __init__(
        self,
        store: AsyncStore,
        journal: Journal,
        history: History,
        marker: str,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """``marker``: an object that every host must find in the run's storage."""
        self._marker = marker
        self._store = store
        self._journal = journal
        self._history = history
        self._say = say
        self._clock = clock
        self._uncommitted = Uncommitted(say)
        self._changed = asyncio.Event()
        self._long = asyncio.Event()

    def look(self) -> None:
        """Something has happened, of which something may have to be written or acknowledged."""
        self._changed.set()

    async def keep_flushing(
        self,
        ttl_s: float,
        collect: Callable[[], list[tuple[HostId, wire.Acknowledge]]],
        send: Callable[[HostId, wire.AnyToAgent], None],
        gone: Callable[[str], None],
    ) -> None:
        """Make durable what has been written, renew the lease, and let agents forget what they need not keep.
        ``collect`` writes what waits to be written, and returns what may be acknowledged after that.
        ``gone``: a checkpoint is no longer where it was.
        """
        wrote = self._clock.now()
        failing = False
        while True:
            await self._wait_for_news()
            acknowledged = collect()
            if self._clock.now() - wrote >= ttl_s / 3:
                self._journal.append(records.Renewed(self._clock.now()))
            try:
                if await self._journal.flush():
                    wrote = self._clock.now()
            except JournalRemovedError as error:
                self._say(f"{error} What was saved there is gone; training goes on, and saves anew")
                await self._start_anew(gone)
                continue
            except StorageError as error:
                if not failing:
                    self._say(f"the journal can't be written: {error}; it is tried again")
                failing = True
                self._changed.set()
                continue
            failing = False
            if self._journal.is_long:
                self._long.set()
            for host, message in acknowledged:
                send(host, message)

    async def _wait_for_news(self) -> None:
        """Until something has happened, and a moment longer: what comes next is written with it."""
        idle = asyncio.get_running_loop().call_later(_IDLE_S, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            idle.cancel()
        self._changed.clear()
        await asyncio.sleep(FLUSH_S)

    async def _start_anew(self, gone: Callable[[str], None]) -> None:
        try:
            for folder in [*self._history.checkpoints]:
                if not await self._store.exists(f"{folder}/{MANIFEST}"):
                    gone(folder)
            await self._store.create(self._marker, b"")
            await self._journal.start_anew(self._history.as_records())
        except JournalRemovedError:
            pass  # and again: the next flush finds out
        except StorageError as error:
            self._say(f"the journal can't be written: {error}; it is tried again")

    async def keep_short(self) -> None:
        """Put old objects of the journal together. A store that is slow at it is asked seldom."""
        while True:
            await self._long.wait()
            self._long.clear()
            try:
                await self._journal.compact()
            except JournalRemovedError:
                pass  # the next record notices, says so and starts anew
            except StorageError as error:
                self._say(f"old records can't be put together: {error}; it is tried again later")
                await asyncio.sleep(_COMPACT_AGAIN_S)

    async def wait_for_stop_request(self, lease: int) -> None:
        """Until somebody at another terminal asks this driver to stop."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if await self._store.exists(stop_request(lease)):
                    return
            except StorageError:
                continue  # that storage is away is reported elsewhere

    def warn_of_uncommitted(self, controller: Controller, limits: Deadlines) -> None:
        """A checkpoint that some ranks never report would wait for ever without a word. What waits longest is
        told, once soon and once later.
        """
        self._uncommitted.look(controller, limits, self._clock.now())
