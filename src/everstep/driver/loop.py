"""The driver: it turns what agents say into events for the brain, and the brain's commands into deeds.

It keeps no opinion of its own. Everything runs on one asyncio loop; what touches the disk runs on one thread
beside it, in order.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, assert_never

import cloudpickle
import msgspec

from everstep.agent import wire
from everstep.backend.lighthouse import NeedsLighthouse
from everstep.control import commands as c, events as e
from everstep.control.controller import Controller
from everstep.control.failures import Failure, Kind
from everstep.control.table import Phase
from everstep.driver import journal
from everstep.driver.aftermath import damaged, put_in_order
from everstep.driver.agreement import Agreement
from everstep.driver.exits import failure_of
from everstep.driver.history import History, plain_value, to_delete
from everstep.driver.job import Job
from everstep.driver.leftbehind import LeftBehind
from everstep.driver.lighthouse import Lighthouse
from everstep.driver.meeting import Meeting
from everstep.driver.notices import Notices
from everstep.driver.observer import Incarnation, Observer
from everstep.driver.registry import LiveRun, LiveWorker, forget_run, publish_run
from everstep.driver.rows import Rows
from everstep.driver.streams import Key, Stream
from everstep.engine.base import Engine
from everstep.errors import FencedError, StorageError
from everstep.storage import checkpoints as store
from everstep.topology.slices import HostId, HostView, natural_key

_FLUSH_S = 0.2
_LOOK_S = 2.0


def stop_request(lease: int) -> str:
    """The object that asks the owner of this lease to stop. Of a lease that is over, it means nothing."""
    return f"requests/stop-{lease}"


class Driver:
    """One run, from opening to ending. ``main`` is the body of its thread; ``stop`` may be called from any
    other.
    """

    def __init__(
        self, job: Job, engine: Engine, log: journal.Journal, history: History, observer: Observer
    ) -> None:
        self._job = job
        self._journal = log
        self._engine = engine
        self._history = history
        self._observer = observer
        self._limits = job.run.deadlines
        self._lease = history.lease + 1
        self.controller = Controller(job.settings())
        self.ended: c.EndRun | None = None
        self.crash: BaseException | None = None
        self.done = threading.Event()
        self.tails: dict[Key, wire.Exited] = {}
        """How workers ended, for the error."""
        self._queue: deque[e.AnyEvent] = deque()
        self._pumping = False
        self._timers: dict[tuple[e.TimerName, int], asyncio.TimerHandle] = {}
        self._streams: dict[Key, Stream] = {}
        self._meetings: dict[int, Meeting] = {}
        """By replica group."""
        self._agreement = Agreement(self._tell, self._lease)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="everstep-disk")
        self._rows = Rows(self._write_rows)
        self.value: Any = None
        """What rank 0 returned, or the leader of another group if rank 0's is not there at the end."""
        self._prepared: set[HostId] = set()
        self._pids: dict[int, int] = {}
        self._notices = Notices(self._agreement.propose)
        self._committing: set[tuple[int, int, int]] = set()
        """(replica group, generation, index) of checkpoints that are being committed."""
        self._starts: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._journal_fails = False
        self._folder_gone = False
        self._left: LeftBehind | None = None
        """While an earlier driver's agents tell what they have."""
        self._uncommitted: dict[str, float] = {}
        """Since when a checkpoint waits for ranks."""
        self._all_metrics = job.wants_all_metrics
        self._lighthouse: Lighthouse | None = None
        if isinstance(job.backend, NeedsLighthouse):
            self._lighthouse = Lighthouse(job.backend.lighthouse(), self._lease, engine.send, engine.address)
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------------ the thread

    def main(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # a bug of ours, or the engine's refusal: either way fit() raises it
            self.crash = error
        finally:
            self.done.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._broken: BaseException | None = None
        flusher = asyncio.create_task(self._keep_flushing())
        try:
            await self._engine.open(self, self._job.ask(self._lease))
            left = await self._take_over()
            if left is None:
                await self._loop.run_in_executor(
                    self._disk,
                    put_in_order,
                    self._job.store,
                    self._history,
                    self._write,
                    self._observer.say,
                )
            self.emit(
                e.RunOpened(
                    at=time.monotonic(),
                    last_epoch=self._history.last_epoch,
                    checkpoints=tuple(k.ref for k in self._history.checkpoints.values()),
                    let_go=tuple(self._history.let_go.values()),
                    spent=tuple(self._history.spent.items()) if left is not None else (),
                    notices=self._history.notices_by(time.time() - time.monotonic()),
                    adopted=left.adopted(self._history.generations(left.epoch)) if left is not None else None,
                )
            )
            if left is not None:
                self._publish()
                self._hear_again(left)
            await self._over.wait()
            if self._broken is not None:
                raise self._broken
        finally:
            for task in (flusher, *self._starts):
                task.cancel()
            # Who was replaced changes nothing on its way out: hosts, journal and registry are another's now.
            fenced = self.ended is not None and self.ended.outcome is c.Outcome.FENCED
            if not fenced:
                self._rows.flush()
                self._write(self._closing())
                forget_run(self._job.name)
            await self._engine.close(keep_hosts=fenced)
            self._disk.shutdown(wait=True)
            if not fenced:
                self._journal.flush()

    def _closing(self) -> journal.Closed:
        now = time.monotonic()
        if self.ended is None:
            return journal.Closed(now, c.Outcome.FAILED.value, "the driver itself failed", None)
        return journal.Closed(now, self.ended.outcome.value, _message(self.ended), plain_value(self.value))

    def _lost_the_run(self, error: FencedError) -> None:
        self.emit(e.LeaseLost(at=time.monotonic(), holder=error.message))

    # ------------------------------------------------------------------ taking a run over

    async def _take_over(self) -> LeftBehind | None:
        """Ask agents that hold workers of this run what they have. What can go on is kept."""
        hosts = self._engine.held()
        if not hosts:
            return None
        self._left = left = LeftBehind(hosts)
        for host in hosts:
            self._engine.claim(host)
        await left.wait(left.told, self._limits.heartbeat_timeout_s)
        self._history.last_epoch = max(self._history.last_epoch, left.epoch)
        views = self.controller.run.fleet.hosts.values()
        why_not = left.give_up_broken({view.id: view.slice for view in views})
        if why_not:
            what = "are ended" if left.broken() else "are missing"
            self._observer.say(f"workers of an earlier driver {what}: {why_not}")
            await self._end_broken(left)
        self._left = None
        kept = left.kept_hosts()
        for host in hosts:
            if host not in kept:
                self._engine.unclaim(host)
        if kept:
            self._streams = left.streams()
            self._pids = left.pids()
            left.outdated = left.fingerprints() != {self._job.fingerprint}
            self._prepared = set() if left.outdated else kept
            self._rows.recall(self._history.reports(left.epoch))
            for group in {stream.assignment.group_id for stream in self._streams.values()}:
                self._meet(group, left.epoch)
            self._restart_agreement(left.epoch)
            if self._lighthouse is not None and left.lighthouse is not None:
                self._lighthouse.found(*left.lighthouse)
            self._write(journal.TakenOver(time.monotonic(), left.epoch))
            self._observer.say(f"took over {len(self._streams)} workers, which never stopped")
            if left.outdated:
                self._observer.say(
                    "the training function or its config changed: they go on with the code of before until "
                    "their next checkpoint, and are restarted with the new code then "
                    f"(after {self._limits.boundary_s:g} s in any case: Deadlines.boundary_s)"
                )
            return left
        return None

    async def _end_broken(self, left: LeftBehind) -> None:
        for (host, generation), ranks in left.broken().items():
            left.stopping.add((host, generation))
            self._engine.send(host, wire.Stop(self._lease, left.epoch, generation, ranks, 0.0))
        await left.wait(left.stopped, self._limits.kill_s)

    def _damaged(self, folder: str, reason: str) -> None:
        if folder in self._history.checkpoints:
            self._observer.say(f"{reason}; the one before it is used")
            self._write(damaged(folder, reason))

    def _hear_again(self, left: LeftBehind) -> None:
        for host, message in left.messages():
            self.on_message(host, message)

    def stop(self, kind: e.StopKind, now: bool) -> None:
        """Ask the run to end. From any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(
                    lambda: self.emit(e.StopRequested(at=time.monotonic(), kind=kind, now=now))
                )
            except RuntimeError:
                pass  # it closed just now: the run has ended

    # ------------------------------------------------------------------ events in, commands out

    def emit(self, event: e.AnyEvent) -> None:
        """Give the brain an event, and do what it says. Deeds may bring new events: those wait their turn."""
        self._queue.append(event)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._queue:
                event = self._queue.popleft()
                for command in self.controller.handle(event):
                    self._carry_out(command)
                if not isinstance(event, e.Reported):
                    self._look_at_groups()
        except BaseException as error:  # a bug: stop with its cause rather than go on with half a decision
            self.on_broken(error)
        finally:
            self._pumping = False

    def _look_at_groups(self) -> None:
        """Something may have changed: who speaks for the run, and which hosts need to know the lighthouse."""
        run = self.controller.run
        replaced = {group for restart in run.restarts for group in restart.groups}
        present = {number for number, group in run.groups.items() if not group.nowhere}
        self._rows.speaker = min(present - replaced, default=0)
        if self._lighthouse is not None:
            fleet = run.fleet
            ours = [host for host in fleet.hosts.values() if host.alive and host.slice in fleet.held]
            ours.sort(key=lambda host: (host.slice in fleet.noticed, natural_key(host.id)))
            self._lighthouse.look([host.id for host in ours])

    def _carry_out(self, command: c.AnyCommand) -> None:
        match command:
            case c.SetTimer():
                self._set_timer(command)
            case c.CancelTimer():
                self._cancel_timer(command.timer, command.key)
            case c.Reserve():
                self._engine.reserve(command.reservation, command.slices)
            case c.Release():
                self._engine.release(command.slices)
            case c.RequestCapacity():
                self._engine.request_capacity(command.workers)
            case c.PrepareHost():
                self._engine.send(command.host, self._job.preparation(self._lease, self._engine))
            case c.RetireHost():
                self._engine.retire(command.host)
            case c.StartWorkers():
                self._start_workers(command)
            case c.StopWorkers():
                stop = wire.Stop(
                    self._lease,
                    command.epoch,
                    command.generation,
                    sorted(command.ranks),
                    command.grace_s,
                )
                self._engine.send(command.host, stop)
                for rank in command.ranks:
                    if stream := self._streams.get((command.epoch, command.generation, rank)):
                        stream.stopped = True
            case c.AskCheckpoint():
                self._agreement.propose(wire.WantCheckpoint(command.reason.value))
            case c.CommitCheckpoint():
                self._commit(command)
            case c.DiscardCheckpoint():
                self._on_disk(lambda: store.discard(self._job.store, command.folder), lambda _: None)
            case c.EndRun():
                self.ended = command
                self._over.set()
            case c.Record():
                self._record(command)
            case _:
                assert_never(command)

    def _set_timer(self, command: c.SetTimer) -> None:
        assert self._loop is not None
        self._cancel_timer(command.timer, command.key)
        delay = command.at - time.monotonic()
        key = (command.timer, command.key)
        self._timers[key] = self._loop.call_later(max(0.0, delay), self._timer_fired, key)

    def _cancel_timer(self, timer: e.TimerName, key: int) -> None:
        handle = self._timers.pop((timer, key), None)
        if handle is not None:
            handle.cancel()

    def _timer_fired(self, key: tuple[e.TimerName, int]) -> None:
        self._timers.pop(key, None)
        self.emit(e.TimerFired(at=time.monotonic(), timer=key[0], key=key[1]))

    # ------------------------------------------------------------------ the engine's words (Sink)

    def on_capacity(self, hosts: tuple[HostView, ...]) -> None:
        self.emit(e.CapacityChanged(at=time.monotonic(), hosts=hosts))

    def on_reserved(self, reservation: int) -> None:
        self.emit(e.Reserved(at=time.monotonic(), reservation=reservation))

    def on_reservation_failed(self, reservation: int, reason: str) -> None:
        self.emit(e.ReservationFailed(at=time.monotonic(), reservation=reservation, reason=reason))

    def on_lost(self, host: HostId, failure: Failure) -> None:
        self._prepared.discard(host)
        self.emit(e.HostLost(at=time.monotonic(), host=host, failure=failure))

    def on_trouble(self, line: str) -> None:
        self._observer.say(line)

    def on_broken(self, error: BaseException) -> None:
        self._broken = error
        self._over.set()

    def on_message(self, host: HostId, message: wire.AnyFromAgent) -> None:
        if self._left is not None:
            self._left.hear(host, message)
            return
        match message:
            case wire.FromWorker():
                self._heard_worker(message)
            case wire.Spawned():
                self._pids[message.rank] = message.pid
                self.emit(
                    e.WorkerSpawned(
                        at=time.monotonic(),
                        epoch=message.epoch,
                        generation=message.generation,
                        rank=message.rank,
                        pid=message.pid,
                    )
                )
            case wire.Exited():
                self._exited(host, message)
            case wire.Uploaded():
                self._uploaded(message)
            case wire.Gone():
                self.emit(
                    e.WorkersGone(
                        at=time.monotonic(),
                        host=host,
                        epoch=message.epoch,
                        generation=message.generation,
                        ranks=frozenset(message.ranks),
                    )
                )
            case wire.Prepared():
                self._host_prepared(host, message)
            case wire.Unprepared():
                self._host_unprepared(host, message)
            case wire.Output():
                self._observer.output(message.rank, message.text)
            case wire.Noticed():
                self._noticed(host, message.grace_s)
            case wire.LighthouseUp():
                if self._lighthouse is not None:
                    self._lighthouse.up(host, message.address)
            case wire.Status() | wire.Beat() | wire.Inventory() | wire.HandedOver():
                pass
            case _:
                assert_never(message)

    # ------------------------------------------------------------------ hosts

    def _host_prepared(self, host: HostId, message: wire.Prepared) -> None:
        if not message.forks and message.why_not and host not in self._prepared:
            self._observer.say(
                f"{host}: {message.why_not}; workers start as fresh processes, which is slower"
            )
        self._prepared.add(host)
        self.emit(e.HostPrepared(at=time.monotonic(), host=host))

    def _host_unprepared(self, host: HostId, message: wire.Unprepared) -> None:
        kind = message.kind
        if kind is Kind.TEMPLATE and host not in self._prepared:
            kind = Kind.START
        self._prepared.discard(host)
        failure = Failure(kind, time.monotonic(), message.message, host=host, traceback=message.traceback)
        self.emit(e.HostUnprepared(at=time.monotonic(), host=host, failure=failure))

    def _noticed(self, host: HostId, grace_s: float | None) -> None:
        now = time.monotonic()
        if grace_s is None:
            self._notices.hear(host, None)
            self.emit(e.NoticeCancelled(at=now, host=host))
        else:
            self._notices.hear(host, now + grace_s)
            self.emit(e.PreemptionNotice(at=now, host=host, deadline=now + grace_s))
        self._tell_notices()

    def _tell_notices(self) -> None:
        if self.controller.phase is Phase.RUNNING:  # else they are told when they train
            self._notices.tell(self._current_streams())

    def _tell_newcomers(self) -> None:
        """Workers that have just started know nothing yet of what is pending."""
        if self._notices.concern(self._current_streams()):
            self._tell_notices()
        asked = self.controller.asked
        if asked is not c.AskReason.NONE:
            self._agreement.propose(wire.WantCheckpoint(asked.value))

    def _restart_agreement(self, epoch: int) -> None:
        groups: dict[int, list[int]] = {}
        for (e_, _, _), stream in self._streams.items():
            if e_ == epoch:
                groups.setdefault(stream.assignment.group_id, []).append(stream.assignment.rank)
        self._agreement.restart(epoch, groups)

    # ------------------------------------------------------------------ starting workers

    def _start_workers(self, command: c.StartWorkers) -> None:
        ranks = {a.rank for a in command.assignments}
        replaced = [key for key in self._streams if key[0] != command.epoch or key[2] in ranks]
        for key in replaced:
            del self._streams[key]
            self._pids.pop(key[2], None)
        if not self._streams:
            self._rows.restart()
            self._agreement.restart(command.epoch, {})
            if replaced and self._lighthouse is not None:
                self._lighthouse.renew()
        generations = dict(command.generations)
        for a in command.assignments:
            generation = generations[a.group_id]
            self._streams[(command.epoch, generation, a.rank)] = Stream(a, generation)
        for group in generations:
            self._meet(group, command.epoch)
            self._agreement.replace(group, [a.rank for a in command.assignments if a.group_id == group])
        start = asyncio.create_task(self._start_once_recorded(self._job.specs(command, self._engine)))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    def _meet(self, group: int, epoch: int) -> None:
        """Collectives of this group count from here on; or from where an earlier driver has seen them."""
        streams = [s for s in self._streams.values() if s.assignment.group_id == group]
        meeting = self._meetings[group] = Meeting(self._tell)
        meeting.restart({s.assignment.rank for s in streams}, epoch, max(s.turn for s in streams))

    async def _start_once_recorded(self, specs: dict[HostId, list[wire.WorkerSpec]]) -> None:
        """The epoch's number is on record before anything can be named after it. Storage that is away is
        waited for; the brain knows for how long.
        """
        assert self._loop is not None
        while specs:
            try:
                await self._loop.run_in_executor(None, self._journal.flush)
            except FencedError as error:
                self._lost_the_run(error)
                return
            except StorageError:
                await asyncio.sleep(_FLUSH_S)
                specs = {host: wanted for host, some in specs.items() if (wanted := self._wanted(some))}
            else:
                break
        for host, some in specs.items():
            if wanted := self._wanted(some):
                self._engine.send(host, wire.Start(self._lease, wanted))

    def _wanted(self, specs: list[wire.WorkerSpec]) -> list[wire.WorkerSpec]:
        """Those of them that have not been stopped meanwhile."""
        keys = [(spec.epoch, spec.generation, spec.member.rank) for spec in specs]
        streams = [self._streams.get(key) for key in keys]
        return [spec for spec, s in zip(specs, streams, strict=True) if s is not None and not s.stopped]

    # ------------------------------------------------------------------ workers' words

    def _heard_worker(self, message: wire.FromWorker) -> None:
        key = (message.epoch, message.generation, message.rank)
        stream = self._streams.get(key)
        if stream is None:
            return  # of an incarnation that is over
        before = stream.upto
        owed: list[int] = []
        parts: list[Any] = []
        restore_s = 0.0
        for word in stream.feed(message.data):
            if isinstance(word, wire.Report):
                restore_s = max(restore_s, word.restore_s)
                if word.part is not None and word.part.folder not in self._history.checkpoints:
                    parts.append(word.part)
                if word.owed:
                    owed.append(word.index)
                if stream.assignment.group_rank == 0:
                    self._rows.add(self.controller.epoch, stream, word.index, word.metrics)
                if self._all_metrics:
                    self._observer.reported(
                        Incarnation(message.epoch, stream.assignment.group_id, message.generation),
                        message.rank,
                        word.index,
                        word.metrics,
                    )
                continue
            if isinstance(word, wire.PartDone):
                if word.part.folder not in self._history.checkpoints:
                    parts.append(word.part)
                continue
            # What came before must be known before what comes now: a return, a failure, a question.
            self._tell_reports(key, stream, before, owed, parts, restore_s)
            before, owed, parts = stream.upto, [], []
            self._heard_word(key, stream, word)
        self._tell_reports(key, stream, before, owed, parts, restore_s)

    def _tell_reports(
        self, key: Key, stream: Stream, before: int, owed: list[int], parts: list[Any], restore_s: float
    ) -> None:
        if stream.upto == before and not parts:
            return
        self._observer.progress(key[2], key[0], stream.upto, self._rows.newest(stream))
        self.emit(
            e.Reported(
                at=time.monotonic(),
                epoch=key[0],
                generation=key[1],
                rank=key[2],
                upto=stream.upto,
                owed=tuple(owed),
                parts=tuple(parts),
                restore_s=restore_s,
            )
        )

    def _heard_word(self, key: Key, stream: Stream, word: wire.AnyFromWorker) -> None:
        epoch, generation, rank = key
        now = time.monotonic()
        match word:
            case wire.Hello():
                self._pids[rank] = word.pid
                if word.endpoint is not None:
                    group = stream.assignment.group_id
                    others = [
                        s.assignment.rank
                        for s in self._current_streams()
                        if s.assignment.group_id == group and s.assignment.rank != rank
                    ]
                    self._tell(epoch, others, wire.Rendezvous(word.endpoint))
            case wire.Joined():
                self.emit(e.WorkerReady(at=now, epoch=epoch, generation=generation, rank=rank))
            case wire.PartFailed():
                self._upload_failed(key, word.index, word.reason)
            case wire.Ask():
                if word.what == "checkpoints":
                    self._answer_checkpoints(epoch, rank, word.seq)
                else:
                    self._meetings[stream.assignment.group_id].ask(rank, word)
            case wire.Counted():
                self._agreement.counted(rank, word)
            case wire.Returned():
                stream.returned = True
                self._agreement.returned(rank)
                if word.value is not None and (rank == 0 or self.value is None):
                    # From a process that this driver started, over a socket that only it has.
                    self.value = cloudpickle.loads(word.value)
                self.emit(e.WorkerReturned(at=now, epoch=epoch, generation=generation, rank=rank))
            case wire.Raised():
                stream.failed = True
                if word.damaged:
                    self._damaged(word.damaged, word.message)
                    self.emit(e.CheckpointDamaged(at=now, folder=word.damaged))
                failure = Failure(
                    # What it was given to start from is no fault of the function's.
                    Kind.EXCEPTION if word.joined and not word.damaged else Kind.START,
                    self._engine.time_here(stream.assignment.host, word.at),
                    word.message,
                    rank=rank,
                    host=stream.assignment.host,
                    echo=word.echo,
                    traceback=word.traceback,
                )
                self.emit(
                    e.WorkerFailed(at=now, epoch=epoch, generation=generation, rank=rank, failure=failure)
                )
            case wire.Report() | wire.PartDone():
                raise AssertionError("reports are merged before they come here")
            case _:
                assert_never(word)

    def _exited(self, host: HostId, message: wire.Exited) -> None:
        key = (message.epoch, message.generation, message.rank)
        self.tails[key] = message
        stream = self._streams.get(key)
        # Who has said that it failed may be ended by us before it ends itself.
        failed = (stream is not None and stream.failed) or (not message.by_us and message.code != 0)
        if failed and not self._job.store.is_local:
            self._keep_tail(message)
        if stream is None or message.by_us or stream.failed or stream.returned:
            return
        stream.failed = True
        at = self._engine.time_here(host, message.at)
        failure = failure_of(message, host, at, stream.joined, self._job.backend)
        self.emit(
            e.WorkerFailed(
                at=time.monotonic(),
                epoch=message.epoch,
                generation=message.generation,
                rank=message.rank,
                failure=failure,
            )
        )

    def _keep_tail(self, message: wire.Exited) -> None:
        """Logs stay on their host; the end of what a failed rank printed goes where the run lives."""
        name = Path(message.log_path).relative_to(self._job.logs).as_posix()
        tail = message.log_tail.encode()
        self._on_disk(lambda: self._job.store.create(f"logs/{name}", tail), lambda _: None)

    def _uploaded(self, message: wire.Uploaded) -> None:
        """An agent finished what its worker could not."""
        key = (message.epoch, message.generation, message.rank)
        stream = self._streams.get(key)
        if stream is None:
            return
        if message.part is None:
            self._upload_failed(key, message.index, message.reason)
        elif message.part.folder not in self._history.checkpoints:
            self._tell_reports(key, stream, stream.upto, [], [message.part], 0.0)

    def _upload_failed(self, key: Key, index: int, reason: str) -> None:
        epoch, generation, rank = key
        self._observer.say(
            f"rank {rank} could not save its part of checkpoint {index}: {reason}; training goes on"
        )
        self.emit(
            e.UploadFailed(
                at=time.monotonic(),
                epoch=epoch,
                generation=generation,
                rank=rank,
                index=index,
                reason=reason,
            )
        )
        self._tell(epoch, [rank], wire.Committed("", index))

    def _answer_checkpoints(self, epoch: int, rank: int, seq: int) -> None:
        run = self._job.store
        rows = [[kept.address(run), kept.metrics] for kept in self._history.checkpoints.values()]
        self._tell(epoch, [rank], wire.Answer(seq, msgspec.msgpack.encode(rows)))

    # ------------------------------------------------------------------ words to workers

    def _current_streams(self) -> list[Stream]:
        epoch = self.controller.epoch
        return [stream for (e_, _, _), stream in self._streams.items() if e_ == epoch]

    def _tell(self, epoch: int, ranks: list[int], message: wire.AnyToWorker) -> None:
        body = wire.frame(message)
        by_host: dict[HostId, list[int]] = {}
        for stream in self._current_streams():
            if stream.assignment.rank in ranks:
                by_host.setdefault(stream.assignment.host, []).append(stream.assignment.rank)
        for host, some in by_host.items():
            self._engine.send(host, wire.Tell(self._lease, epoch, some, body))

    def _tell_all(self, message: wire.AnyToWorker) -> None:
        ranks = [stream.assignment.rank for stream in self._current_streams()]
        self._tell(self.controller.epoch, ranks, message)

    # ------------------------------------------------------------------ checkpoints

    def _commit(self, command: c.CommitCheckpoint) -> None:
        ready = command.checkpoint
        run = self._job.store
        metrics = self._rows.with_checkpoint(command.group, command.generation, ready.index)
        ranks = [rank for rank, _ in ready.parts]
        under_way = (command.group, command.generation, ready.index)
        self._committing.add(under_way)

        def on_disk() -> store.Manifest:
            return store.commit(
                run, ready.folder, command.epoch, ready.index, [part.record for _, part in ready.parts]
            )

        def done(outcome: store.Manifest | BaseException) -> None:
            now = time.monotonic()
            self._committing.discard(under_way)
            if isinstance(outcome, BaseException):
                self._observer.say(f"checkpoint {ready.folder} could not be committed: {outcome}")
                self.emit(e.CommitFailed(at=now, folder=ready.folder, reason=str(outcome)))
            else:
                self._rows.flush()
                self._write(
                    journal.Committed(
                        now,
                        ready.folder,
                        command.epoch,
                        ready.index,
                        metrics,
                        outcome.external,
                        command.group,
                        command.generation,
                        command.order,
                    )
                )
                self._on_disk(self._journal.flush, lambda _: None)
                self.emit(e.CheckpointCommitted(at=now, folder=ready.folder))
                self._retain()
                self._stop_as_requested()
                of = Incarnation(command.epoch, command.group, command.generation)
                address = self._history.checkpoints[ready.folder].address(run)
                self._observer.committed(of, ready.index, address)
            if self.controller.phase is Phase.RUNNING:
                # Else its ranks are being ended, and stay where they are until then.
                self._tell(command.epoch, ranks, wire.Committed(ready.folder, ready.index))

        self._on_disk(on_disk, done)

    def _retain(self) -> None:
        for folder in to_delete(self._history, self._job.run.checkpoint_config):
            self._write(journal.Deleted(time.monotonic(), folder))
            self.emit(e.CheckpointGone(at=time.monotonic(), folder=folder))

            def remove(folder: str = folder) -> None:
                self._journal.flush()
                if self._job.run.checkpoint_config.delete_external:
                    store.delete_external(self._job.store, folder, self._job.run.storage_options)
                store.discard(self._job.store, folder)

            self._on_disk(remove, lambda _: None)

    # ------------------------------------------------------------------ the journal

    def _record(self, record: c.Record) -> None:
        self._write(record)  # type: ignore[arg-type]
        self._observer.record(record)
        if isinstance(record, c.GroupStarted):
            self._publish()
            self._tell_newcomers()
        elif isinstance(record, c.PreemptionSeen) and record.deadline is None:
            gone = {s.assignment.host for s in self._current_streams() if s.assignment.slice == record.slice}
            self._notices.forget(gone)
            self._tell_notices()

    def _write(self, record: journal.AnyRecord) -> None:
        self._journal.append(record)
        if not isinstance(record, journal.Metrics | journal.Opened):
            self._history.apply(record)

    def _write_rows(self, record: journal.Metrics) -> None:
        self._write(record)
        self._history.metrics.extend(record.rows)

    async def _keep_flushing(self) -> None:
        """Make durable what has been written, say that we live, and let the agents forget what they need not
        keep.
        """
        beat = self._job.run.lease_ttl_s / 3
        wrote = looked = time.monotonic()
        while True:
            await asyncio.sleep(_FLUSH_S)
            self._rows.flush()
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                self._on_disk(self._is_stop_requested, self._stop_if_requested)
                if self._job.store.is_local:
                    self._on_disk(lambda: self._job.store.exists(self._job.marker), self._folder_seen)
            if time.monotonic() - wrote >= beat:
                self._journal.append(journal.Renewed(time.monotonic()))
            if self._journal.has_news:
                wrote = time.monotonic()
            self._on_disk(self._journal.flush, self._acknowledgements())
            if self._journal.is_long:
                self._on_disk(self._journal.compact, lambda _: None)
            self._warn_of_uncommitted()

    def _folder_seen(self, seen: object) -> None:
        if seen is False and not self._folder_gone:
            self._observer.say(
                f"{self._job.store.address()} was removed or replaced while the run uses it: what was saved "
                "there before is gone; training goes on, and saves anew"
            )
        self._folder_gone = seen is False

    def _is_stop_requested(self) -> bool:
        return self._job.store.exists(stop_request(self._lease))

    def _stop_if_requested(self, requested: object) -> None:
        """From another terminal: a last checkpoint where the function takes the hint, then the end."""
        if requested is not True or self._stopping:
            return
        assert self._loop is not None
        self._stopping = True
        self._observer.say("asked to stop, by everstep stop")
        self._agreement.propose(wire.WantCheckpoint(c.AskReason.STOP.value))
        self._loop.call_later(self._limits.last_checkpoint_s, self._stop_as_requested)

    def _stop_as_requested(self) -> None:
        if self._stopping:
            self.emit(e.StopRequested(at=time.monotonic(), kind=e.StopKind.USER))

    def _acknowledgements(self) -> Callable[[object], None]:
        """What agents need not keep once all that is written now is durable."""
        groups = self.controller.groups
        by_host: dict[HostId, list[tuple[int, int, int, bytes]]] = {}
        for (_, generation, rank), stream in self._streams.items():
            number = stream.assignment.group_id
            group = groups.get(number)
            if group is None or group.generation != generation:
                continue
            awaited = {k for g, n, k in self._committing if (g, n) == (number, generation)}
            awaited |= group.book.awaited(rank)
            stream.settle(awaited, self._meetings[number].waits(rank, stream.turn))
            moved = stream.acknowledgement()
            if moved is not None:
                by_host.setdefault(stream.assignment.host, []).append((generation, rank, *moved))
        epoch = self.controller.epoch

        def tell(outcome: object) -> None:
            failed = isinstance(outcome, Exception)
            if failed and not self._journal_fails:
                self._observer.say(f"the journal can't be written: {outcome}; it is tried again")
            self._journal_fails = failed
            for host, ranks in by_host.items() if not failed else ():
                self._engine.send(host, wire.Acknowledge(self._lease, epoch, ranks))

        return tell

    def _warn_of_uncommitted(self) -> None:
        """A checkpoint that some ranks never report would wait for ever without a word."""
        now = time.monotonic()
        seen: dict[str, float] = {}
        for group in self.controller.groups.values():
            for index, folder in group.book.open_folders.items():
                since = seen[folder] = self._uncommitted.get(folder, now)
                if now - since > self._limits.commit_warn_s:
                    ranks = ", ".join(map(str, group.book.missing(index)))
                    self._observer.say(
                        f"checkpoint {folder} waits for ranks {ranks}: every rank must call report() "
                        "equally often"
                    )
                    seen[folder] = math.inf  # once is enough
        self._uncommitted = seen

    def _on_disk(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Do something that may wait for the disk, in order, and come back with what it gave or raised."""
        assert self._loop is not None
        loop = self._loop

        def call() -> None:
            try:
                outcome: Any = work()
            except FencedError as error:
                loop.call_soon_threadsafe(self._lost_the_run, error)
                return
            except Exception as error:  # handed to whoever asked for it
                outcome = error
            loop.call_soon_threadsafe(done, outcome)

        self._disk.submit(call)

    def _publish(self) -> None:
        """Let other terminals find this run's processes."""
        workers = [
            LiveWorker(
                s.assignment.rank, self._pids.get(s.assignment.rank, 0), s.assignment.host, s.assignment.slice
            )
            for s in self._current_streams()
        ]
        live = LiveRun(self._job.name, self._job.store.address(), os.getpid(), self.controller.epoch, workers)
        publish_run(live)
        self._observer.started(live)


def _message(end: c.EndRun) -> str:
    if end.cause is None:
        return end.message
    rank = f"rank {end.cause.rank}: " if end.cause.rank is not None else ""
    return f"{rank}{end.cause.message} ({end.message})"
