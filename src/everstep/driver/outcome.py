"""How a driver ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from everstep.control import commands as c
from everstep.errors import EverstepError, FencedError


class DriverOutcome:
    """How a driver ends, for the thread that waits for it."""

    def __init__(self) -> None:
        self.end: c.EndRun | None = None
        self.broken: BaseException | None = None
        """Why it could not go on."""
        self.crash: BaseException | None = None
        """What its thread ended with."""
        self.unrecorded: EverstepError | None = None
        """Why the end is not in the journal, if it isn't."""
        self.replaced = False
        """Agents obey a later driver."""
        self.done = threading.Event()
        self.over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_fenced(self) -> bool:
        """Also if it was found out only when the end was to be recorded."""
        ended = self.end is not None and self.end.outcome is c.Outcome.FENCED
        return ended or self.replaced or isinstance(self.unrecorded, FencedError)

    @property
    def is_finished(self) -> bool:
        """Every rank has returned, as far as is known."""
        return self.broken is None and self.end is not None and self.end.outcome is c.Outcome.FINISHED

    def begin(self) -> None:
        self._loop = asyncio.get_running_loop()

    def ended(self, end: c.EndRun) -> None:
        self.end = end
        self.over.set()

    def breaks(self, error: BaseException) -> None:
        self.broken = self.broken or error  # what breaks because of it says less
        self.over.set()

    async def unless_over(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this for as long as the run has not ended: a user may stop it, or another driver take it."""
        if self.over.is_set():
            work.close()
            return
        task, over = asyncio.ensure_future(work), asyncio.ensure_future(self.over.wait())
        try:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            is_late = task.cancel()
        if not is_late:
            task.result()
            return
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # of a run that has ended by then, for another cause

    def call(self, work: Callable[[], None]) -> None:
        """On the driver's loop, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(work)
            except RuntimeError:
                pass  # it closed just now: the run has ended

    def in_a_word(self) -> str:
        """Nothing where it has not ended, and nothing says why not."""
        if self.is_fenced:
            return "taken over"
        if self.crash is not None or self.broken is not None:
            return c.Outcome.FAILED.value
        return self.end.outcome.value if self.end is not None else ""

    def message(self) -> str:
        """What the run's last record says of it."""
        end = self.end
        if end is None:
            return "the driver itself failed"
        if end.cause is None:
            return end.message
        rank = f"rank {end.cause.rank}: " if end.cause.rank is not None else ""
        return f"{rank}{end.cause.message} ({end.message})"
