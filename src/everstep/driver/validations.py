"""Validations: what the user's function finds of checkpoints, beside training, one at a time.

Which checkpoints wait for theirs is in the journal: a driver that takes the run over goes on with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import cloudpickle
import msgspec

from everstep.checkpoint import Checkpoint, ReportedCheckpointStatus as Status
from everstep.control.events import StopKind
from everstep.driver.job import Job
from everstep.engine.base import SideTask, SideTaskDiedError, SideTaskFailedError
from everstep.journal.history import History, KeptCheckpoint
from everstep.protocol import framing
from everstep.protocol.metrics import NO_METRICS
from everstep.storage.asynchronous import AsyncStore
from everstep.validation import ValidationTask

_MOST_DEATHS = 3
"""Of processes that a validation is tried in."""


class Validations:
    def __init__(
        self,
        job: Job,
        store: AsyncStore,
        history: History,
        run_side_task: Callable[[SideTask], Awaitable[bytes]],
        validated: Callable[[str, Status, msgspec.Raw], None],
        say: Callable[[str], None],
    ) -> None:
        """``validated`` records what a validation came to."""
        self._job = job
        self._store = store
        self._history = history
        self._run_side_task = run_side_task
        self._validated = validated
        self._say = say
        self._news = asyncio.Event()
        self._news.set()  # an earlier driver may have left some
        self._settled = asyncio.Event()
        self._stopped: StopKind | None = None
        self._replaced = False
        self.committing: set[str] = set()
        """Folders of checkpoints that are being committed, and may have to be validated then."""

    def look(self) -> None:
        """There may be one that waits."""
        self._news.set()

    async def keep_validating(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while pending := self._history.pending():
                await self._validate(pending[0])
                self._settled.set()

    async def finish(self) -> StopKind | None:
        """Until none waits. Who has stopped it, if some are left for the next start, or may be: who stops at
        once doesn't wait for commits either.
        """
        while self._history.pending() and self._stopped is None and not self._replaced:
            self._settled.clear()
            await self._settled.wait()
        return self._stopped if self._history.pending() or self.committing else None

    def stop(self, kind: StopKind) -> None:
        self._stopped = kind
        self._settled.set()

    def replaced(self) -> None:
        """Another driver has the run, and makes them."""
        self._replaced = True
        self._settled.set()

    async def _validate(self, kept: KeptCheckpoint) -> None:
        config, folder = self._job.validation, kept.ref.folder
        if config is None:
            self._say(
                f"checkpoint {folder} waits for a validation, and Trainer(validation_config=…) is no longer "
                "given: it isn't validated"
            )
            self._validated(folder, Status.COMMITTED, NO_METRICS)
            return
        checkpoint = Checkpoint(kept.address(self._store), storage_options=self._job.run.storage_options)
        task = config.task(kept.validation, checkpoint)
        status, metrics = await self._found(folder, task)
        if kept.is_pending and folder in self._history.checkpoints:
            self._validated(folder, status, metrics)

    async def _found(self, folder: str, task: ValidationTask) -> tuple[Status, msgspec.Raw]:
        reason = ""
        for _ in range(_MOST_DEATHS):
            limit = asyncio.timeout(task.timeout_s)
            try:
                work = self._job.side_task(bytes(cloudpickle.dumps(task)), self._job.logs / "validation.log")
                async with limit:
                    return Status.VALIDATED, msgspec.Raw(await self._run_side_task(work))
            except TimeoutError:
                if not limit.expired():
                    raise
                self._say(f"the validation of {folder} took longer than {task.timeout_s:g} s, and was ended")
                return Status.VALIDATION_TIMEOUT, NO_METRICS
            except SideTaskDiedError as error:
                reason = str(error)
            except SideTaskFailedError as error:
                reason = str(error)
                break
        self._say(f"the validation of {folder} failed: {reason}")
        return Status.VALIDATION_FAILED, NO_METRICS


def validate_here(
    task: ValidationTask, folder: str, say: Callable[[str], None]
) -> tuple[Status, msgspec.Raw]:
    """In this process, for a debugger."""
    try:
        return Status.VALIDATED, msgspec.Raw(task.run())
    except Exception as error:  # of the user's function: training goes on, as with workers
        say(f"the validation of {folder} failed: {framing.described(error)}")
        return Status.VALIDATION_FAILED, NO_METRICS
