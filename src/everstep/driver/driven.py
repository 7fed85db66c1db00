"""The run that a driver drives: what it is, where it is kept, and how the driver's parts reach each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller
from everstep.deadlines import Deadlines
from everstep.driver.housekeeping import Housekeeping
from everstep.driver.job import Job
from everstep.driver.outcome import DriverOutcome
from everstep.driver.pump import Pump
from everstep.driver.unsaved import Unsaved
from everstep.engine.base import Engine
from everstep.errors import FencedError, StorageError
from everstep.identity import WorkerId
from everstep.journal import records
from everstep.journal.history import History
from everstep.journal.lease import Lease
from everstep.observe.observer import Observer
from everstep.process.clock import Clock
from everstep.storage.asynchronous import AsyncStore


class DrivenRun:
    """Shared by all parts of one driver. Decides nothing: events go to the controller, records to the
    journal, and what is started here ends with the driver.
    """

    def __init__(
        self, job: Job, store: AsyncStore, engine: Engine, lease: Lease, observer: Observer, clock: Clock
    ) -> None:
        self.job = job
        self.store = store
        self.engine = engine
        self.lease = lease
        self.observer = observer
        self.clock = clock
        self.controller = Controller(job.settings())
        self.outcome = DriverOutcome()
        self.unsaved = Unsaved()
        self.house = Housekeeping(store, lease.journal, lease.history, job.marker, observer.say, clock)
        self._pump: Pump | None = None
        self._recorded: Callable[[c.Record], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress: dict[WorkerId, e.Reported] = {}
        """How far workers have come, which the controller is told before anything else."""

    def connect(
        self,
        carry_out: Callable[[c.AnyCommand], None],
        handled: Callable[[e.Event], None],
        recorded: Callable[[c.Record], None],
    ) -> None:
        """``carry_out`` is called with commands, ``handled`` after each event, ``recorded`` with
        each record.
        """
        self._pump = Pump(self.controller, carry_out, handled)
        self._recorded = recorded

    @property
    def history(self) -> History:
        return self.lease.history

    @property
    def precedence(self) -> int:
        """What agents know this driver by: of two, they obey the higher."""
        return self.lease.precedence

    @property
    def limits(self) -> Deadlines:
        return self.job.run.deadlines

    # ------------------------------------------------------------------ events and records

    def emit(self, event: e.Event) -> None:
        """Give the controller an event, and do what it says."""
        self._put(*self._take_progress(), event)

    def emit_progress(self, event: e.Reported) -> None:
        """A worker has come so far, and there is no more to say of it. The controller gets this before any
        other event, at the end of this turn of the loop at the latest: one for all that is said until then.
        """
        if not self._progress:
            asyncio.get_running_loop().call_soon(lambda: self._put(*self._take_progress()))
        worker = WorkerId(event.epoch, event.generation, event.rank)
        self._progress.pop(worker, None)  # in order of their times
        self._progress[worker] = event

    def _take_progress(self) -> Iterable[e.Reported]:
        taken, self._progress = self._progress, {}
        return taken.values()

    def _put(self, *events: e.Event) -> None:
        assert self._pump is not None, "a driver connects its parts before it drives"
        try:
            for event in events:
                self._pump.put(event)
        except BaseException as error:  # a bug: stop with its cause rather than go on with half a decision
            self.outcome.breaks(error)

    def write(self, record: records.AnyRecord) -> None:
        self.lease.journal.append(record)
        self.history.apply(record)
        self.house.look()

    def record(self, record: c.Record) -> None:
        """What the controller decided or learnt: for the journal, and for all who watch."""
        self.write(record)  # type: ignore[arg-type]
        self.observer.record(record)
        assert self._recorded is not None, "a driver connects its parts before it drives"
        self._recorded(record)

    # ------------------------------------------------------------------ what goes on beside

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, FencedError):
            self.emit(e.LeaseLost(at=self.clock.now(), holder=error.holder))
        elif error is not None:
            self.outcome.breaks(error)

    async def look_at_lease(self, limit_s: float) -> bool:
        """Whether the journal confirms that this driver owns the run. Raises ``FencedError`` if another one
        does; False if storage doesn't answer.
        """
        self.write(records.Renewed(self.clock.now()))
        try:
            async with asyncio.timeout(limit_s):
                await self.lease.journal.flush()
        except (StorageError, TimeoutError):
            return False
        return True

    async def find_new_owner(self) -> None:
        """Agents say that another driver has taken the run. The journal says who, and has the last word,
        unless storage doesn't answer.
        """
        if not await self.look_at_lease(self.limits.storage_s):
            raise FencedError("another driver")
        self.outcome.replaced = False

    def cancel_tasks(self) -> None:
        for task in [*self._tasks]:
            task.cancel()

    def keep_file(self, name: str, data: bytes, what: str) -> None:
        """Beside training, where the run lives. Logs stay on their host; the end of what a failed rank
        printed is kept, and so are the stacks of workers that hang.
        """
        self.spawn(self._keep_file(name, data, what))

    async def _keep_file(self, name: str, data: bytes, what: str) -> None:
        try:
            await self.store.create(name, data)
        except StorageError as error:
            self.observer.say(f"{what} can't be saved: {error}")
