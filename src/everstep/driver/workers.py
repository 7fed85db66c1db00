"""The workers, as the driver knows them: what they say becomes events, and messages find them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import cloudpickle

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller
from everstep.control.failures import Failure, Kind
from everstep.control.reports import Part
from everstep.control.stragglers import Straggler
from everstep.control.table import Phase
from everstep.driver import records
from everstep.driver.agreement import Agreement
from everstep.driver.clock import Clock
from everstep.driver.exits import failure_of
from everstep.driver.history import History
from everstep.driver.job import Job
from everstep.driver.meeting import Meeting
from everstep.driver.notices import NoticesToWorkers
from everstep.driver.observer import Incarnation, Observer
from everstep.driver.questions import CheckpointQuestions
from everstep.driver.registry import LiveWorker
from everstep.driver.rows import Rows
from everstep.driver.stalls import Stalls
from everstep.driver.states import SnapshotCadence
from everstep.driver.stragglers import StragglerWatch
from everstep.driver.streams import Key, WorkerStream
from everstep.driver.tempo import Tempo
from everstep.engine.base import Engine
from everstep.protocol import framing, wire, words
from everstep.topology.slices import HostId

Emit = Callable[[e.AnyEvent], None]


class Workers:
    def __init__(
        self,
        job: Job,
        lease: int,
        controller: Controller,
        history: History,
        write: Callable[[records.AnyRecord], None],
        record: Callable[[c.Record], None],
        emit: Emit,
        engine: Engine,
        observer: Observer,
        clock: Clock,
    ) -> None:
        self._job = job
        self._lease = lease
        self._controller = controller
        self._history = history
        self._write = write
        self._emit = emit
        self._engine = engine
        self._observer = observer
        self._clock = clock
        self.streams: dict[Key, WorkerStream] = {}
        self.pids: dict[int, int] = {}
        self.rows = Rows(write)
        self.results = Results()
        self.talk = Talk(self.tell, lease, clock)
        grouped = job.scaling.replica_group_size is not None
        # With replica groups, a group that is replaced takes its state from the others.
        memory = None if grouped else job.run.checkpoint_config.memory
        self.tempo = Tempo(
            SnapshotCadence(memory, self.talk.agreement.propose, observer.say),
            Stalls(write, history.ledger),
            StragglerWatch(record),
        )
        self.questions = CheckpointQuestions(
            self.tell, controller, history, job.store, job.run.checkpoint_config, clock
        )

    # ------------------------------------------------------------------ who they are

    def current(self) -> list[WorkerStream]:
        epoch = self._controller.epoch
        return [stream for (e_, _, _), stream in self.streams.items() if e_ == epoch]

    def live(self) -> list[LiveWorker]:
        return [
            LiveWorker(
                a.rank,
                self.pids.get(a.rank, 0),
                a.host,
                a.slice,
                note=self.tempo.stragglers.note_of(a.rank),
            )
            for a in (stream.assignment for stream in self.current())
        ]

    def begin(self, command: c.StartWorkers) -> bool:
        """These start, in place of those that had their ranks. True if nobody else is left."""
        ranks = {a.rank for a in command.assignments}
        replaced = [key for key in self.streams if key[0] != command.epoch or key[2] in ranks]
        for key in replaced:
            del self.streams[key]
            self.pids.pop(key[2], None)
            self.questions.forget(key[2])
        alone = not self.streams
        if alone:
            self.rows.restart()
            self.talk.agreement.restart(command.epoch, {})
        generations = dict(command.generations)
        for a in command.assignments:
            generation = generations[a.group_id]
            self.streams[(command.epoch, generation, a.rank)] = WorkerStream(a, generation)
        self.tempo.start(command.epoch, self.streams.values(), ranks, self._clock.now())
        for group in generations:
            self.talk.meet(group, command.epoch, self.streams.values())
            self.talk.agreement.replace(group, [a.rank for a in command.assignments if a.group_id == group])
        return alone and bool(replaced)

    def adopt(self, streams: dict[Key, WorkerStream], pids: dict[int, int], epoch: int) -> None:
        """Workers of an earlier driver."""
        self.streams, self.pids = streams, pids
        named = [Straggler(one.ranks, one.kind, one.slower) for one in self._history.slow(epoch)]
        self.tempo.adopt(epoch, streams.values(), named, self._clock.now())
        self.rows.recall(self._history.reports(epoch))
        groups: dict[int, list[int]] = {}
        for stream in streams.values():
            groups.setdefault(stream.assignment.group_id, []).append(stream.assignment.rank)
        for group in groups:
            self.talk.meet(group, epoch, streams.values())
        self.talk.agreement.restart(epoch, groups)

    def tell_adopted(self) -> None:
        """How far the workers of an earlier driver have come, which that one had dealt with."""
        for key, stream in self.streams.items():
            self._tell_reports(key, stream, 0, [], [], [], [], 0.0)

    def stopping(self, command: c.StopWorkers) -> None:
        for rank in command.ranks:
            if stream := self.streams.get((command.epoch, command.generation, rank)):
                stream.stopped = True

    def wanted(self, specs: list[wire.WorkerSpec]) -> list[wire.WorkerSpec]:
        """Those of them that have not been stopped meanwhile."""
        keys = [(spec.epoch, spec.generation, spec.member.rank) for spec in specs]
        streams = [self.streams.get(key) for key in keys]
        return [spec for spec, s in zip(specs, streams, strict=True) if s is not None and not s.stopped]

    # ------------------------------------------------------------------ messages to them

    def tell(self, epoch: int, ranks: list[int], message: words.AnyToWorker) -> None:
        body = framing.frame(message)
        by_host: dict[HostId, list[int]] = {}
        for stream in self.current():
            if stream.assignment.rank in ranks:
                by_host.setdefault(stream.assignment.host, []).append(stream.assignment.rank)
        for host, some in by_host.items():
            self._engine.send(host, wire.Tell(self._lease, epoch, some, body))

    def noticed(self, host: HostId, grace_s: float | None) -> None:
        now = self._clock.now()
        deadline = None if grace_s is None else now + grace_s
        self.talk.notices.hear(host, deadline)
        if deadline is None:
            self._emit(e.NoticeCancelled(at=now, host=host))
        else:
            self._emit(e.PreemptionNotice(at=now, host=host, deadline=deadline))
        self._tell_notices()

    def notice_is_over(self, slice_: str) -> None:
        gone = {s.assignment.host for s in self.current() if s.assignment.slice == slice_}
        self.talk.notices.forget(gone)
        self._tell_notices()

    def _tell_notices(self) -> None:
        if self._controller.phase is Phase.RUNNING:  # else they are told when they train
            self.talk.notices.tell(self.current())

    def tell_newcomers(self) -> None:
        """Workers that have just started know nothing yet of what is pending."""
        if self.talk.notices.concern(self.current()):
            self._tell_notices()
        asked = self._controller.asked
        if asked is not c.AskReason.NONE:
            self.talk.agreement.propose(words.WantCheckpoint(asked.value))

    def acknowledgements(self) -> list[tuple[HostId, wire.Acknowledge]]:
        """What agents need not keep once all that is written now is durable."""
        by_host: dict[HostId, list[tuple[int, int, int, bytes]]] = {}
        for (_, generation, rank), stream in self.streams.items():
            number = stream.assignment.group_id
            group = self._controller.groups.get(number)
            if group is None or group.generation != generation:
                continue
            awaited = self._controller.committing(group) | group.book.awaited(rank)
            unanswered = self.talk.unanswered(number, rank) | self.questions.unanswered(rank)
            stream.settle(awaited, unanswered)
            moved = stream.acknowledgement()
            if moved is not None:
                by_host.setdefault(stream.assignment.host, []).append((generation, rank, *moved))
        epoch = self._controller.epoch
        return [(host, wire.Acknowledge(self._lease, epoch, ranks)) for host, ranks in by_host.items()]

    # ------------------------------------------------------------------ what they say

    def spawned(self, message: wire.Spawned) -> None:
        self.pids[message.rank] = message.pid
        self._emit(
            e.WorkerSpawned(
                at=self._clock.now(),
                epoch=message.epoch,
                generation=message.generation,
                rank=message.rank,
                pid=message.pid,
            )
        )

    def heard(self, message: wire.FromWorker) -> None:
        key = (message.epoch, message.generation, message.rank)
        stream = self.streams.get(key)
        if stream is None:
            return  # of an incarnation that is over
        before = stream.upto
        owed: list[int] = []
        parts: list[Part] = []
        copied: list[int] = []
        copying: list[int] = []
        restore_s = 0.0
        for word in stream.feed(message.data):
            if isinstance(word, words.Report | words.Copied | words.StallTold):
                self.tempo.heard(message.epoch, stream, word, self.current, self._clock.now())
            if isinstance(word, words.Report):
                restore_s = max(restore_s, word.restore_s)
                parts += self._news(word.part)
                if word.owed:
                    owed.append(word.index)
                if word.copied:
                    copied.append(word.index)
                if word.copying:
                    copying.append(word.index)
                self._add_row(key, stream, word)
                continue
            if isinstance(word, words.PartDone):
                parts += self._news(word.part)
                continue
            if isinstance(word, words.Copied):
                copied.append(word.index)
                continue
            if isinstance(word, words.StallTold):
                continue
            # What came before must be known before what comes now: a return, a failure, a question.
            self._tell_reports(key, stream, before, owed, parts, copied, copying, restore_s)
            before, owed, parts, copied, copying = stream.upto, [], [], [], []
            self._heard_word(key, stream, word)
        self._tell_reports(key, stream, before, owed, parts, copied, copying, restore_s)

    def _news(self, part: Part | None) -> list[Part]:
        return [] if part is None or part.folder in self._history.checkpoints else [part]

    def _add_row(self, key: Key, stream: WorkerStream, report: words.Report) -> None:
        epoch, generation, rank = key
        if report.silent:
            if stream.assignment.group_rank == 0:
                self.rows.add_silent(stream, report.index, report.metrics)
            return
        if stream.assignment.group_rank == 0:
            self.rows.add(self._controller.epoch, stream, report.index, report.metrics)
        if self._job.wants_all_metrics:
            of = Incarnation(epoch, stream.assignment.group_id, generation)
            self._observer.reported(of, rank, report.index, report.metrics)

    def _tell_reports(
        self,
        key: Key,
        stream: WorkerStream,
        before: int,
        owed: list[int],
        parts: list[Part],
        copied: list[int],
        copying: list[int],
        restore_s: float,
    ) -> None:
        if stream.upto == before and not parts and not copied:
            return
        epoch, generation, rank = key
        self._observer.progress(rank, epoch, stream.upto, self.rows.newest(stream))
        self._emit(
            e.Reported(
                at=self._clock.now(),
                epoch=epoch,
                generation=generation,
                rank=rank,
                upto=stream.upto,
                owed=tuple(owed),
                parts=tuple(parts),
                restore_s=restore_s,
                copied=tuple(copied),
                copying=tuple(copying),
            )
        )

    def _heard_word(self, key: Key, stream: WorkerStream, word: words.AnyFromWorker) -> None:
        epoch, generation, rank = key
        now = self._clock.now()
        match word:
            case words.Hello():
                self.pids[rank] = word.pid
                if word.endpoint is not None:
                    group = stream.assignment.group_id
                    members = [s.assignment for s in self.current() if s.assignment.group_id == group]
                    others = [a.rank for a in members if a.rank != rank]
                    self.tell(epoch, others, words.Rendezvous(word.endpoint))
            case words.Joined():
                self._emit(e.WorkerReady(at=now, epoch=epoch, generation=generation, rank=rank))
            case words.PartFailed():
                self._upload_failed(key, word.index, word.reason)
            case words.NoMemory():
                self.tempo.cadence.refused(rank, word.reason)
            case words.Ask():
                if word.turn:
                    self.talk.meetings[stream.assignment.group_id].ask(rank, word)
                else:
                    self.questions.ask(rank, word)
            case words.Counted():
                self.talk.agreement.counted(rank, word)
            case words.Returned():
                stream.returned = True
                self.talk.agreement.returned(rank)
                self.talk.meetings[stream.assignment.group_id].returned(rank)
                self.results.returned(rank, word)
                self._emit(e.WorkerReturned(at=now, epoch=epoch, generation=generation, rank=rank))
            case words.Raised():
                self._raised(key, stream, word)
            case words.Report() | words.Copied() | words.StallTold() | words.PartDone():
                raise AssertionError("reports are merged before they come here")
            case _:
                assert_never(word)

    def _raised(self, key: Key, stream: WorkerStream, word: words.Raised) -> None:
        epoch, generation, rank = key
        now = self._clock.now()
        stream.failed = True
        if word.damaged:
            self._damaged(word.damaged, word.message)
            self._emit(e.CheckpointDamaged(at=now, folder=word.damaged))
        if word.lost_snapshot:
            self._observer.say(f"{word.message}; the newest checkpoint in storage is used")
            self._emit(e.SnapshotDamaged(at=now))
        failure = Failure(
            _kind_of(word),
            self._engine.time_here(stream.assignment.host, word.at),
            word.message,
            rank=rank,
            host=stream.assignment.host,
            echo=word.echo,
            traceback=word.traceback,
        )
        self._emit(e.WorkerFailed(at=now, epoch=epoch, generation=generation, rank=rank, failure=failure))

    def _damaged(self, folder: str, reason: str) -> None:
        if folder in self._history.checkpoints:
            self._observer.say(f"{reason}; the one before it is used")
            self._write(records.Damaged(self._clock.now(), folder, reason))

    # ------------------------------------------------------------------ how they end

    def exited(self, host: HostId, message: wire.Exited) -> tuple[str, bytes] | None:
        """Returns the name and the end of a failed rank's log, where logs don't lie in the run's storage."""
        key = (message.epoch, message.generation, message.rank)
        self.results.tails[key] = message
        stream = self.streams.get(key)
        for index in sorted(stream.bound) if stream is not None else ():
            self._upload_failed(key, index, "its process ended before its upload was done")
        # A worker that has reported a failure may be killed before it exits.
        failed = (stream is not None and stream.failed) or (not message.by_us and message.code != 0)
        if stream is not None and not (message.by_us or stream.failed or stream.returned):
            stream.failed = True
            at = self._engine.time_here(host, message.at)
            failure = failure_of(message, host, at, stream.joined, self._job.backend)
            self._emit(
                e.WorkerFailed(
                    at=self._clock.now(),
                    epoch=message.epoch,
                    generation=message.generation,
                    rank=message.rank,
                    failure=failure,
                )
            )
        if not failed or self._job.store.is_local:
            return None
        name = Path(message.log_path).relative_to(self._job.logs).as_posix()
        return f"logs/{name}", message.log_tail.encode()

    def uploaded(self, message: wire.Uploaded) -> None:
        """An agent finished what its worker could not."""
        key = (message.epoch, message.generation, message.rank)
        stream = self.streams.get(key)
        if stream is None:
            return
        if message.part is None:
            self._upload_failed(key, message.index, message.reason)
        else:
            self._tell_reports(key, stream, stream.upto, [], self._news(message.part), [], [], 0.0)

    def _upload_failed(self, key: Key, index: int, reason: str) -> None:
        epoch, generation, rank = key
        self._observer.say(
            f"rank {rank} could not save its part of checkpoint {index}: {reason}; training goes on"
        )
        self._emit(
            e.UploadFailed(
                at=self._clock.now(),
                epoch=epoch,
                generation=generation,
                rank=rank,
                index=index,
                reason=reason,
            )
        )
        self.tell(epoch, [rank], words.CommitTold("", index))


class Talk:
    """What the ranks agree on among each other, through the driver."""

    def __init__(
        self, tell: Callable[[int, list[int], words.AnyToWorker], None], lease: int, clock: Clock
    ) -> None:
        self._tell = tell
        self.meetings: dict[int, Meeting] = {}
        """By replica group."""
        self.agreement = Agreement(tell, lease)
        self.notices = NoticesToWorkers(self.agreement.propose, clock)

    def meet(self, group: int, epoch: int, streams: Any) -> None:
        """Collectives of this group count from here on; or from where an earlier driver has seen them."""
        members = [s for s in streams if s.assignment.group_id == group]
        meeting = self.meetings[group] = Meeting(self._tell)
        returned = {s.assignment.rank for s in members if s.returned}
        meeting.restart({s.assignment.rank for s in members}, epoch, max(s.turn for s in members), returned)

    def unanswered(self, group: int, rank: int) -> set[int]:
        """The numbers of this rank's collectives that are still to be answered."""
        return self.meetings[group].unanswered(rank)


class Results:
    """What workers leave behind: how they ended, and what they returned."""

    def __init__(self) -> None:
        self.tails: dict[Key, wire.Exited] = {}
        """How workers ended, for the error."""
        self.value: Any = None
        """What rank 0 returned, or the leader of another group if rank 0's is not there at the end."""
        self.problem = ""
        """Why that can't be had, although the function returned something."""

    def returned(self, rank: int, word: words.Returned) -> None:
        if rank == 0 or self.value is None:
            self.value, self.problem = _loaded(word)


def _kind_of(word: words.Raised) -> Kind:
    if word.final:
        return Kind.LIMIT
    # What it was given to start from is no fault of the function's.
    given = not word.damaged and not word.lost_snapshot
    return Kind.EXCEPTION if word.joined and given else Kind.START


def _loaded(word: words.Returned) -> tuple[Any, str]:
    """(what a worker returned, why that can't be had). It comes from a process that this driver started, over
    a socket that only it has.
    """
    if word.value is None:
        return None, word.problem
    try:
        return cloudpickle.loads(word.value), ""
    except Exception as error:  # a class that isn't here, a device that isn't: anything may be raised
        return None, f"it can't be loaded in this process: {type(error).__name__}: {error}"
