"""Requests to end a run: from signals, and from other terminals."""

from __future__ import annotations

import asyncio

from everstep.control import events as e
from everstep.driver.driven import DrivenRun
from everstep.driver.validations import Validations


class Stopping:
    def __init__(self, run: DrivenRun, validations: Validations) -> None:
        self._run = run
        self._validations = validations
        self._ends = asyncio.Event()
        """Workers are being ended, for good."""

    def stop(self, kind: e.StopKind, now: bool) -> None:
        self._stop(kind, e.StopRequested(at=self._run.clock.now(), kind=kind, now=now))

    def _stop(self, kind: e.StopKind, request: e.StopRequested | e.StopAtCheckpointRequested) -> None:
        self._validations.stop(kind)
        self._run.emit(request)
        if self._run.outcome.end is None:
            self._run.spawn(self._check_storage_at_the_end())

    def ends(self) -> None:
        """The controller has begun to end the run."""
        self._ends.set()

    async def _check_storage_at_the_end(self) -> None:
        """Checkpoints that are under way are not waited for while storage is away, or full: it must take a
        record.
        """
        run = self._run
        await self._ends.wait()
        await asyncio.sleep(run.limits.stop_grace_s)
        if not await run.look_at_lease(run.limits.storage_answer_s / 2):
            run.emit(e.StorageLost(at=run.clock.now()))

    async def stop_on_request(self) -> None:
        """From another terminal: a last checkpoint where the function takes the hint, then the end."""
        run = self._run
        await run.house.wait_for_stop_request(run.lease.number)
        run.observer.say("asked to stop, by everstep stop")
        self._stop(e.StopKind.USER, e.StopAtCheckpointRequested(at=run.clock.now()))
