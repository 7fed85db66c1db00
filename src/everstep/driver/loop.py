"""The driver: events to the controller, its commands carried out, from the opening of a run to its end.

It decides nothing itself. Everything runs on one asyncio loop; what touches storage is awaited.
"""

from __future__ import annotations

import asyncio

from everstep.control import commands as c, events as e
from everstep.control.table import Phase
from everstep.driver.announcing import Announcements
from everstep.driver.carry_out import CarryOut
from everstep.driver.checkpointing import Checkpointing
from everstep.driver.closing import close_run
from everstep.driver.driven import DrivenRun
from everstep.driver.from_workers import FromWorkers
from everstep.driver.incoming import Incoming
from everstep.driver.job import Job
from everstep.driver.opening import open_run
from everstep.driver.stopping import Stopping
from everstep.driver.unsaved import UnsavedReports
from everstep.driver.workers import Workers
from everstep.engine.base import Engine
from everstep.journal import records
from everstep.journal.lease import Lease
from everstep.observe.observer import Observer
from everstep.observe.registry import Registry
from everstep.process.clock import Clock, MachineClock
from everstep.protocol import wire
from everstep.storage.asynchronous import AsyncStore
from everstep.topology.slices import HostId
from everstep.torchft.placement import LighthousePlacement, lighthouse_for


class Driver:
    """One run, from opening to ending. ``main`` is the body of its thread; ``stop`` may be called from any
    other.
    """

    def __init__(
        self,
        job: Job,
        store: AsyncStore,
        engine: Engine,
        lease: Lease,
        observer: Observer,
        registry: Registry,
        clock: Clock | None = None,
    ) -> None:
        self._run = DrivenRun(job, store, engine, lease, observer, clock or MachineClock())
        self.controller = self._run.controller
        self.outcome = self._run.outcome
        self.workers = Workers(self._run)
        self._from_workers = FromWorkers(self._run, self.workers)
        self.announcements = Announcements(self._run, self.workers, registry)
        self._checkpoints = Checkpointing(self._run, self.workers)
        self._stopping = Stopping(self._run, self._checkpoints.validations)
        self._lighthouse: LighthousePlacement | None = lighthouse_for(
            job.backend, lease.precedence, engine.send, engine.address
        )
        self._incoming = Incoming(self._run, self.workers, self._from_workers, self._lighthouse)
        carry_out = CarryOut(self._run, self.workers, self._checkpoints, self._incoming, self._lighthouse)
        self._run.connect(carry_out.command, self._handled, self._recorded)

    def main(self) -> None:
        try:
            asyncio.run(self.drive())
        except BaseException as error:  # a bug of ours, or the engine's refusal: either way fit() raises it
            self.outcome.crash = error
        finally:
            self.outcome.done.set()

    async def drive(self) -> None:
        run, validations = self._run, self._checkpoints.validations
        self.outcome.begin()
        run.spawn(
            run.house.keep_flushing(
                run.job.run.lease_ttl_s, self._collect, run.engine.send, self._checkpoints.gone
            )
        )
        run.spawn(run.house.keep_short())
        run.spawn(self._stopping.stop_on_request())
        try:
            left = (place.host for place in run.history.places.values())
            request = run.job.engine_request(run.precedence, run.history.run_id, left)
            await self.outcome.unless_over(run.engine.open(self._incoming, request))
            await self.outcome.unless_over(self._open())
            run.engine.count_silence()
            run.spawn(validations.keep_validating())
            await self.outcome.over.wait()
            if self.outcome.is_finished and (stopped := await validations.finish()):
                self.outcome.end = c.EndRun(c.Outcome.STOPPED, None, (), stopped.value, stopped)
        finally:
            self._incoming.echoes.show()
            await close_run(run, self.workers, self._checkpoints.commits, self.announcements)
        if self.outcome.broken is not None:
            raise self.outcome.broken

    async def _open(self) -> None:
        left = await open_run(
            self._run, self.workers, self._incoming, self._checkpoints.deletions, self._lighthouse
        )
        if left is not None:
            self.announcements.started()
            self._from_workers.emit_adopted()
            for host, message in left.messages():
                self._incoming.on_message(host, message)

    def unsaved(self) -> UnsavedReports | None:
        """What was reported in vain, once the driver has ended."""
        newest = self._run.history.newest
        return self._run.unsaved.at_the_end(self.controller, newest.ref if newest is not None else None)

    def stop(self, kind: e.StopKind, now: bool) -> None:
        """Ask the run to end. From any thread."""
        self.outcome.call(lambda: self._stopping.stop(kind, now))

    # ------------------------------------------------------------------ after each event, record and flush

    def _handled(self, event: e.Event) -> None:
        """Something may have changed: what is committed, whose metrics are the run's, and which hosts need
        the address of the lighthouse.
        """
        self._run.house.look()
        self.workers.questions.answer()
        if isinstance(event, e.LeaseLost):
            self._checkpoints.validations.replaced()
        if isinstance(event, e.Reported):
            return
        self.workers.metrics.source = min((group.number for group in self.controller.steady()), default=0)
        self.announcements.count()
        if self._lighthouse is not None:
            self._lighthouse.place([host.id for host in self.controller.hosts_held()])

    def _recorded(self, record: c.Record) -> None:
        self._incoming.echoes.recorded(record)
        if isinstance(record, c.GroupStarted):
            self.announcements.started()
            self.workers.update_newcomers()
            self._checkpoints.group_started()
        elif isinstance(record, c.PhaseChanged) and record.phase == Phase.ENDING:
            self._stopping.ends()
        elif isinstance(record, records.StragglerSeen):
            self.announcements.register()
        elif isinstance(record, c.PreemptionSeen) and record.deadline is None:
            self.workers.notice_is_over(record.slice)

    def _collect(self) -> list[tuple[HostId, wire.Acknowledge]]:
        """Write what waits to be written. Returns what agents may forget after that."""
        run = self._run
        self._checkpoints.look()
        self.workers.metrics.flush()
        self.workers.pace.stalls.flush(run.clock.now())
        run.house.warn_of_uncommitted(self.controller, run.limits)
        self.workers.questions.warn(run.limits.report_warn_s, run.observer.say)
        return self.workers.acknowledgements()
