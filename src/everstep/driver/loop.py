"""The driver: it turns what agents say into events for the controller, and the controller's commands into
deeds.

It keeps no opinion of its own. Everything runs on one asyncio loop; what touches storage is awaited.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable
from typing import Any, assert_never

import msgspec

from everstep.backend.lighthouse import NeedsLighthouse
from everstep.checkpoint import ReportedCheckpointStatus
from everstep.control import commands as c, events as e
from everstep.control.controller import Controller
from everstep.control.table import Phase
from everstep.driver import records
from everstep.driver.clock import Clock, MachineClock
from everstep.driver.commits import Commits
from everstep.driver.deletions import Deletions
from everstep.driver.figures import census_of
from everstep.driver.history import plain_value
from everstep.driver.housekeeping import FLUSH_S, Housekeeping
from everstep.driver.incoming import Incoming
from everstep.driver.job import Job
from everstep.driver.lease import Lease
from everstep.driver.lighthouse import Lighthouse
from everstep.driver.observer import Incarnation, Observer
from everstep.driver.outcome import DriverOutcome
from everstep.driver.pump import Pump, Timers
from everstep.driver.registry import LiveRun, Registry
from everstep.driver.repair import Repair
from everstep.driver.stacks import stacks_page
from everstep.driver.states import StatesDue
from everstep.driver.takeover import LeftBehind, ask_agents
from everstep.driver.validations import Validations
from everstep.driver.workers import Workers
from everstep.engine.base import Engine
from everstep.errors import FencedError, StorageError
from everstep.protocol import wire, words
from everstep.storage.asynchronous import AsyncStore
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, natural_key


class Driver:
    """One run, from opening to ending. ``main`` is the body of its thread; ``stop`` may be called from any
    other.
    """

    def __init__(
        self,
        job: Job,
        run: AsyncStore,
        engine: Engine,
        lease: Lease,
        observer: Observer,
        registry: Registry,
        clock: Clock | None = None,
    ) -> None:
        self._job = job
        self._run = run
        self._engine = engine
        self._lease = lease
        self._observer = observer
        self._registry = registry
        self._clock = clock or MachineClock()
        self._limits = job.run.deadlines
        self.controller = Controller(job.settings())
        self.outcome = DriverOutcome()
        config = job.run.checkpoint_config
        self._deletions = Deletions(
            run,
            lease.journal,
            lease.history,
            delete_external=config.delete_external,
            storage_options=job.run.storage_options,
        )
        self._commits = Commits(
            run,
            lease.history,
            self._deletions,
            config,
            self._write,
            self.emit,
            observer.say,
            self._spawn,
            self._clock,
        )
        self._validations = Validations(
            job, run, lease.history, engine.run_aside, self._validated, observer.say
        )
        self.workers = Workers(
            job,
            lease.precedence,
            self.controller,
            lease.history,
            self._write,
            self._record,
            self.emit,
            engine,
            observer,
            self._clock,
        )
        self._states = StatesDue(config.storage_every_s, self.workers.talk.agreement.propose)
        self._house = Housekeeping(run, lease.journal, lease.history, job.marker, observer.say, self._clock)
        self._pump = Pump(self.controller, self._carry_out, self._handled)
        self._timers = Timers(self._clock, self.emit)
        self._tasks: set[asyncio.Task[None]] = set()
        self.census = census_of(self.controller.run, job.scaling.max_workers)
        """How many workers are in which state. Never changed, but replaced: any thread may look."""
        self._lighthouse: Lighthouse | None = None
        if isinstance(job.backend, NeedsLighthouse):
            self._lighthouse = Lighthouse(
                job.backend.lighthouse(), lease.precedence, engine.send, engine.address
            )
        self._incoming = Incoming(
            self._clock,
            self.emit,
            self.outcome.breaks,
            self._keep_tail,
            self.workers,
            observer,
            self._lighthouse,
        )

    # ------------------------------------------------------------------ from beginning to end

    def main(self) -> None:
        try:
            asyncio.run(self.drive())
        except BaseException as error:  # a bug of ours, or the engine's refusal: either way fit() raises it
            self.outcome.crash = error
        finally:
            self.outcome.done.set()

    async def drive(self) -> None:
        self.outcome.begin()
        self._spawn(
            self._house.keep_flushing(
                self._job.run.lease_ttl_s, self._collect, self._engine.send, self._checkpoint_gone
            )
        )
        self._spawn(self._house.keep_short())
        self._spawn(self._stop_on_request())
        try:
            await self._engine.open(self._incoming, self._job.ask(self._lease.precedence))
            await self._open()
            self._spawn(self._validations.keep_validating())
            await self.outcome.over.wait()
            if self.outcome.is_finished and (stopped := await self._validations.finish()):
                self.outcome.end = c.EndRun(c.Outcome.STOPPED, None, (), stopped.value, stopped)
        finally:
            await self._close()
        if self.outcome.broken is not None:
            raise self.outcome.broken

    async def _open(self) -> None:
        history = self._lease.history
        self._observer.opened(history.ledger)
        await self._lease.mend(self._observer.say)
        repair = Repair(self._run, history, self._deletions, self._write, self._observer.say, self._clock)
        await repair.adopt_manifests()
        left, remains = await self._take_over()
        if left is None:
            await repair.put_in_order(journal_is_whole=not self._lease.damage)
        self.emit(
            e.RunOpened(
                at=self._clock.now(),
                last_epoch=history.last_epoch,
                checkpoints=tuple(k.ref for k in history.checkpoints.values()),
                let_go=tuple(history.let_go.values()),
                spent=tuple(history.spent.items()) if left is not None else (),
                notices=history.notices_by(self._clock.wall() - self._clock.now()),
                adopted=left.adopted(history.generations(left.epoch)) if left is not None else None,
                remains=remains,
            )
        )
        if left is not None:
            self._publish()
            self.workers.tell_adopted()
            for host, message in left.messages():
                self._incoming.on_message(host, message)

    async def _close(self) -> None:
        # A driver that was replaced changes nothing on its way out: hosts, journal and registry are another's
        # now.
        try:
            if not self.outcome.is_fenced:
                self.workers.rows.flush()
                self.workers.tempo.stalls.flush(self._clock.now(), all_=True)
                self._write(self._closing())
                await self._record_the_end()
        finally:  # whatever goes wrong before: nothing is left running
            fenced = self.outcome.is_fenced
            for task in [*self._tasks]:
                task.cancel()
            if not fenced:
                self._registry.forget(self._job.name)
            await self._engine.close(keep_hosts=fenced)

    async def _record_the_end(self) -> None:
        try:
            async with asyncio.timeout(self._limits.closing_s):
                await self._lease.journal.flush()
        except TimeoutError:
            limit_s = self._limits.closing_s
            self.outcome.unrecorded = StorageError(f"no answer within {limit_s:g} s (Deadlines.closing_s)")
        except (StorageError, FencedError) as error:
            self.outcome.unrecorded = error
        else:
            await self._commits.finish_deletions(self._limits.closing_s)

    def _closing(self) -> records.Closed:
        now = self._clock.now()
        end, message = self.outcome.end, self.outcome.message()
        if end is None:
            return records.Closed(now, c.Outcome.FAILED.value, message, None)
        return records.Closed(now, end.outcome.value, message, plain_value(self.workers.results.value))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, FencedError):
            self.emit(e.LeaseLost(at=self._clock.now(), holder=error.holder))
        elif error is not None:
            self.outcome.breaks(error)

    # ------------------------------------------------------------------ taking a run over

    async def _take_over(self) -> tuple[LeftBehind | None, e.Remains | None]:
        """Keep what can go on of the workers that an earlier driver left behind, or, if none can, what their
        hosts have in memory.
        """
        hosts = self._engine.held()
        if not hosts:
            return None, None
        self._incoming.left = left = LeftBehind(hosts, self._lease.history.last_epoch)
        await ask_agents(
            self._engine, left, self._lease.precedence, self._slices, self._limits, self._observer.say
        )
        self._incoming.left = None
        history = self._lease.history
        history.last_epoch = max(history.last_epoch, left.epoch)
        kept = left.kept_hosts()
        if not kept:
            return None, left.remains(self._slices())
        self.workers.adopt(left.streams(), left.pids(), left.epoch)
        left.outdated = left.fingerprints() != {self._job.fingerprint}
        self._incoming.prepared = set() if left.outdated else kept
        if self._lighthouse is not None and left.lighthouse is not None:
            self._lighthouse.found(*left.lighthouse)
        self._write(records.TakenOver(self._clock.now(), left.epoch))
        # Who was placed by a record that is damaged now, is placed again.
        self._write_places([s.assignment for s in self.workers.streams.values()], others_stay=False)
        self._observer.say(f"took over {len(self.workers.streams)} workers, which never stopped")
        if left.outdated:
            self._observer.say(
                "the training function or its config changed: they go on with the previous version of your "
                "code until their next checkpoint, and are restarted with the new one then "
                f"(after {self._limits.boundary_s:g} s in any case: Deadlines.boundary_s)"
            )
        return left, None

    def _slices(self) -> dict[HostId, str]:
        return {view.id: view.slice for view in self.controller.run.fleet.hosts.values()}

    # ------------------------------------------------------------------ events in, commands out

    def emit(self, event: e.AnyEvent) -> None:
        """Give the controller an event, and do what it says."""
        try:
            self._pump.put(event)
        except BaseException as error:  # a bug: stop with its cause rather than go on with half a decision
            self.outcome.breaks(error)

    def _handled(self, event: e.AnyEvent) -> None:
        """Something may have changed: what is committed, who speaks for the run, and which hosts need to know
        the lighthouse.
        """
        self.workers.questions.answer()
        if isinstance(event, e.Reported):
            return
        run = self.controller.run
        replaced = {group for restart in run.restarts for group in restart.groups}
        present = {number for number, group in run.groups.items() if not group.nowhere}
        self.workers.rows.speaker = min(present - replaced, default=0)
        self.census = census_of(run, self._job.scaling.max_workers)
        if self._lighthouse is not None:
            fleet = run.fleet
            ours = [host for host in fleet.hosts.values() if host.alive and host.slice in fleet.held]
            ours.sort(key=lambda host: (host.slice in fleet.noticed, natural_key(host.id)))
            self._lighthouse.look([host.id for host in ours])

    def _carry_out(self, command: c.AnyCommand) -> None:
        match command:
            case c.SetTimer():
                self._timers.set(command)
            case c.CancelTimer():
                self._timers.cancel(command.timer, command.key)
            case c.Reserve():
                self._engine.reserve(command.reservation, command.slices)
            case c.Release():
                self._engine.release(command.slices)
            case c.RequestCapacity():
                self._engine.request_capacity(command.workers)
            case c.PrepareHost():
                self._engine.send(command.host, self._job.preparation(self._lease.precedence, self._engine))
            case c.RetireHost():
                self._engine.retire(command.host)
            case c.StartWorkers():
                self._start_workers(command)
            case c.StopWorkers():
                self._stop_workers(command)
            case c.KeepSnapshot():
                kept = words.Kept(command.kept, command.upto)
                self.workers.tell(command.epoch, list(command.ranks), kept)
            case c.ExamineWorkers():
                self._engine.send(
                    command.host, wire.Examine(self._lease.precedence, command.epoch, command.look)
                )
            case c.KeepStacks():
                self._spawn(self._keep(command.name, stacks_page(command).encode(), "stacks of workers"))
            case c.AskCheckpoint():
                self.workers.talk.agreement.propose(words.WantCheckpoint(command.reason.value))
            case c.CommitCheckpoint():
                self._spawn(self._commit(command))
            case c.DiscardCheckpoint():
                self._commits.discard(command.folder)
            case c.EndRun():
                self.outcome.ended(command)
            case c.Record():
                self._record(command)
            case _:
                assert_never(command)

    def _start_workers(self, command: c.StartWorkers) -> None:
        self._write_places(command.assignments, others_stay=not command.full)
        if self.workers.begin(command) and self._lighthouse is not None:
            self._lighthouse.renew()
        snapshot_every = self.workers.tempo.cadence.reports
        self._spawn(self._start_once_recorded(self._job.specs(command, self._engine, snapshot_every)))

    def _write_places(self, assignments: Iterable[Assignment], others_stay: bool) -> None:
        placed = self._lease.history.placed(self._clock.now(), assignments, others_stay)
        if placed is not None:
            self._write(placed)

    async def _start_once_recorded(self, specs: dict[HostId, list[wire.WorkerSpec]]) -> None:
        """The attempt's number is on record before anything can be named after it. Storage that is away is
        waited for; the controller knows for how long.
        """
        while specs:
            try:
                await self._lease.journal.flush()
                break
            except StorageError:
                await asyncio.sleep(FLUSH_S)
                specs = {host: some for host, every in specs.items() if (some := self.workers.wanted(every))}
        for host, every in specs.items():
            if some := self.workers.wanted(every):
                self._engine.send(host, wire.Start(self._lease.precedence, some))

    def _stop_workers(self, command: c.StopWorkers) -> None:
        ranks = sorted(command.ranks)
        stop = wire.Stop(self._lease.precedence, command.epoch, command.generation, ranks, command.grace_s)
        self._engine.send(command.host, stop)
        self.workers.stopping(command)

    def _keep_tail(self, name: str, data: bytes) -> None:
        self._spawn(self._keep(name, data, "the log of a failed rank"))

    async def _keep(self, name: str, data: bytes, what: str) -> None:
        """Logs stay on their host; the end of what a failed rank printed goes where the run lives, and so do
        the stacks of workers that hang.
        """
        try:
            await self._run.create(name, data)
        except StorageError as error:
            self._observer.say(f"{what} can't be saved: {error}")

    # ------------------------------------------------------------------ stopping

    def stop(self, kind: e.StopKind, now: bool) -> None:
        """Ask the run to end. From any thread."""
        self.outcome.call(lambda: self._stop(kind, now))

    def _stop(self, kind: e.StopKind, now: bool) -> None:
        self._validations.stop(kind)
        self.emit(e.StopRequested(at=self._clock.now(), kind=kind, now=now))
        if self.outcome.end is None:
            self._spawn(self._check_storage_at_the_end())

    async def _check_storage_at_the_end(self) -> None:
        """Checkpoints that are under way are not waited for while storage is away, or full: it must take a
        record.
        """
        await asyncio.sleep(self._limits.stop_grace_s)
        self._write(records.Renewed(self._clock.now()))
        try:
            async with asyncio.timeout(self._limits.storage_answer_s / 2):
                await self._lease.journal.flush()
        except (TimeoutError, StorageError):
            self.emit(e.StorageLost(at=self._clock.now()))

    async def _stop_on_request(self) -> None:
        """From another terminal: a last checkpoint where the function takes the hint, then the end."""
        await self._house.wait_for_stop_request(self._lease.number)
        self._observer.say("asked to stop, by everstep stop")
        self.workers.talk.agreement.propose(words.WantCheckpoint(c.AskReason.STOP.value))
        self.outcome.stop_at_checkpoint = True
        await asyncio.sleep(self._limits.last_checkpoint_s)
        self._stop(e.StopKind.USER, now=False)

    # ------------------------------------------------------------------ checkpoints and records

    async def _commit(self, command: c.CommitCheckpoint) -> None:
        ready = command.checkpoint
        metrics = self.workers.rows.with_checkpoint(command.group, command.generation, ready.index)
        if await self._commits.commit(command, metrics):
            of = Incarnation(command.epoch, command.group, command.generation)
            kept = self._lease.history.checkpoints.get(ready.folder)
            if kept is not None:
                self._observer.committed(of, ready.index, kept.address(self._run))
            self._states.saved()
            self._validations.look()
            if self.outcome.stop_at_checkpoint:
                self._stop(e.StopKind.USER, now=False)
        if self.controller.phase is Phase.RUNNING:
            # Else its ranks are being ended, and stay where they are until then.
            ranks = [rank for rank, _ in ready.parts]
            self.workers.tell(command.epoch, ranks, words.CommitTold(ready.folder, ready.index))

    def _validated(self, folder: str, status: ReportedCheckpointStatus, metrics: msgspec.Raw) -> None:
        self._commits.validated(records.Validated(self._clock.now(), folder, status.value, metrics))
        self.workers.questions.answer()

    def _checkpoint_gone(self, folder: str) -> None:
        """It isn't there now, and nobody gave it up. If it comes back, with a disk that was away, it is one
        of the run's again.
        """
        self._lease.history.forget(folder)
        self.emit(e.CheckpointGone(at=self._clock.now(), folder=folder))

    def _look_for_states(self) -> None:
        if self.controller.phase is Phase.RUNNING:
            self._states.look(self._clock.now())
            self.workers.tempo.cadence.look()

    def _collect(self) -> list[tuple[HostId, wire.Acknowledge]]:
        self._look_for_states()
        self.workers.rows.flush()
        self.workers.tempo.stalls.flush(self._clock.now())
        self._house.warn_of_uncommitted(self.controller, self._limits)
        self.workers.questions.warn(self._limits.report_warn_s, self._observer.say)
        return self.workers.acknowledgements()

    def _record(self, record: c.Record) -> None:
        self._write(record)  # type: ignore[arg-type]
        self._observer.record(record)
        if isinstance(record, c.GroupStarted):
            self._publish()
            self.workers.tell_newcomers()
            self._states.restart(self._clock.now())
        elif isinstance(record, c.StragglerSeen):
            self._register()
        elif isinstance(record, c.PreemptionSeen) and record.deadline is None:
            self.workers.notice_is_over(record.slice)

    def _write(self, record: records.AnyRecord) -> None:
        self._lease.journal.append(record)
        self._lease.history.apply(record)

    def _publish(self) -> None:
        """Let other terminals find this run's processes, and say where they are."""
        self._observer.started(self._register())

    def _register(self) -> LiveRun:
        live = LiveRun(
            self._job.name, self._run.address(), os.getpid(), self.controller.epoch, self.workers.live()
        )
        try:
            self._registry.publish(live)
        except OSError as error:
            self._observer.say(f"other terminals can't find this run: {error}")
        return live
