"""Messages of workers, and of agents about workers, as events for the controller."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from everstep.control import events as e
from everstep.driver.driven import DrivenRun
from everstep.driver.exits import failure_of
from everstep.driver.streams import WorkerStream
from everstep.driver.workers import Workers
from everstep.failures import Failure, Kind
from everstep.identity import Incarnation, WorkerId
from everstep.journal import records
from everstep.observe.observer import NewReports
from everstep.protocol import wire, worker_messages
from everstep.saved.reports import Part
from everstep.topology.slices import HostId


@dataclass
class _Batch:
    """Reports that become one event for the controller."""

    before: int
    """The last report that it knows of."""
    with_metrics: list[worker_messages.Report] = field(default_factory=list)
    owed: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    taking: list[int] = field(default_factory=list)
    restore_s: float = 0.0
    earlier: int = 0
    """The last that was made before this driver ran; 0: none was."""

    @property
    def says_more(self) -> bool:
        """Than how far the worker has come."""
        return bool(self.owed or self.parts or self.taken or self.taking or self.restore_s)

    def add(self, report: worker_messages.Report, settled: Collection[int]) -> None:
        if not report.silent:
            self.with_metrics.append(report)
        if report.restore_s > self.restore_s:
            self.restore_s = report.restore_s
        if report.owed and report.index not in settled:
            self.owed.append(report.index)
        if report.taken:
            self.taken.append(report.index)
        if report.taking:
            self.taking.append(report.index)


class FromWorkers:
    def __init__(self, run: DrivenRun, workers: Workers) -> None:
        self._run = run
        self._workers = workers

    def emit_adopted(self) -> None:
        """How far the workers of an earlier driver have come, which that one had dealt with."""
        for key, stream in self._workers.streams.items():
            taking = [stream.taking] if stream.taking else []
            self._emit_reports(key, stream, _Batch(0, taking=taking, earlier=stream.upto))

    # ------------------------------------------------------------------ messages

    def spawned(self, message: wire.Spawned) -> None:
        self._workers.pids[message.rank] = message.pid
        self._run.emit(
            e.WorkerSpawned(
                at=self._run.clock.now(),
                epoch=message.epoch,
                generation=message.generation,
                rank=message.rank,
                pid=message.pid,
            )
        )

    def received(self, chunk: wire.FromWorker) -> None:
        key = WorkerId(chunk.epoch, chunk.generation, chunk.rank)
        stream = self._workers.streams.get(key)
        if stream is None:
            return  # of an incarnation that is over
        pace, now = self._workers.pace, self._run.clock.now()
        batch = _Batch(stream.upto)
        for message in stream.feed(chunk.data):
            match message:
                case worker_messages.Report():  # there are far more of these than of all else
                    pace.reported(chunk.rank, message, now)
                    batch.add(message, stream.settled)
                    if stream.behind:
                        self._note_when_made(stream, message, batch)
                    if message.part is not None:
                        batch.parts += self._new_parts(stream, message.part)
                    if message.silent and stream.assignment.group_rank == 0:
                        self._workers.metrics.add_silent(stream, message.index, message.metrics)
                case worker_messages.PartDone():
                    batch.parts += self._new_parts(stream, message.part)
                case worker_messages.SnapshotTaken():
                    pace.cadence.taken(chunk.rank, message.copy_s, message.whole_s)
                    batch.taken.append(message.index)
                case worker_messages.StallReported():
                    pace.stalled(chunk.epoch, stream, message, self._workers.current(), now)
                case _:
                    # What came before must be known before what comes now: a return, a failure, a question.
                    self._emit_reports(key, stream, batch)
                    batch = _Batch(stream.upto, restore_s=batch.restore_s)
                    self._message(key, stream, message)
        self._emit_reports(key, stream, batch)

    def _note_when_made(self, stream: WorkerStream, report: worker_messages.Report, batch: _Batch) -> None:
        """Whether it was made before this driver ran, as the others after it may have been."""
        opened, here = self._run.history.opened, stream.assignment.host
        assert opened is not None, "a driver has opened its run"
        if report.at is not None and self._run.engine.time_here(here, report.at) < opened.at:
            batch.earlier = report.index
        else:
            stream.behind = False

    def _new_parts(self, stream: WorkerStream, part: Part) -> list[Part]:
        """Unless it was committed or given up before, also where the journal has lost that."""
        if part.index in stream.settled or part.folder in self._run.history.checkpoints:
            return []
        return [part]

    def _add_metrics(
        self, key: WorkerId, stream: WorkerStream, reports: list[worker_messages.Report]
    ) -> None:
        epoch, generation, rank = key
        if stream.assignment.group_rank == 0:
            self._workers.metrics.add(self._run.controller.epoch, stream, reports)
        if self._run.job.wants_all_metrics:
            of = Incarnation(epoch, stream.assignment.group_id, generation)
            for report in reports:
                saves = report.owed or report.part is not None
                self._run.observer.reported(of, rank, report.index, report.metrics, saves)

    def _emit_reports(self, key: WorkerId, stream: WorkerStream, batch: _Batch) -> None:
        if batch.with_metrics:
            self._add_metrics(key, stream, batch.with_metrics)
        if stream.upto == batch.before and not batch.parts and not batch.taken:
            return
        epoch, generation, rank = key
        news = NewReports(self._workers.metrics.newest(stream), batch.earlier)
        self._run.observer.progress(rank, epoch, stream.upto, news)
        emit = self._run.emit if batch.says_more else self._run.emit_progress
        emit(
            e.Reported(
                at=self._run.clock.now(),
                epoch=epoch,
                generation=generation,
                rank=rank,
                upto=stream.upto,
                owed=tuple(batch.owed),
                parts=tuple(batch.parts),
                restore_s=batch.restore_s,
                taken=tuple(batch.taken),
                taking=tuple(batch.taking),
            )
        )

    def _message(self, key: WorkerId, stream: WorkerStream, message: worker_messages.AnyFromWorker) -> None:
        epoch, generation, rank = key
        now = self._run.clock.now()
        match message:
            case worker_messages.Hello():
                self._workers.pids[rank] = message.pid
                if message.endpoint is not None:
                    group = stream.assignment.group_id
                    members = [
                        s.assignment for s in self._workers.current() if s.assignment.group_id == group
                    ]
                    others = [a.rank for a in members if a.rank != rank]
                    self._workers.send(epoch, others, worker_messages.Rendezvous(message.endpoint))
            case worker_messages.Joined():
                self._run.emit(e.WorkerReady(at=now, epoch=epoch, generation=generation, rank=rank))
            case worker_messages.PartFailed():
                self._upload_failed(key, message.index, message.reason)
            case worker_messages.NoMemory():
                self._workers.pace.cadence.refused(rank, message.reason)
            case worker_messages.Question():
                if message.turn:
                    self._workers.talk.collectives[stream.assignment.group_id].ask(rank, message)
                else:
                    self._workers.questions.ask(rank, message)
            case worker_messages.Counted():
                self._workers.talk.synchronized.counted(rank, message)
            case worker_messages.Returned():
                stream.returned = True
                self._workers.talk.synchronized.returned(rank)
                self._workers.talk.collectives[stream.assignment.group_id].returned(rank)
                self._workers.results.returned(rank, message)
                self._run.emit(e.WorkerReturned(at=now, epoch=epoch, generation=generation, rank=rank))
            case worker_messages.Raised():
                self._raised(key, stream, message)
            case (
                worker_messages.Report()
                | worker_messages.SnapshotTaken()
                | worker_messages.StallReported()
                | worker_messages.PartDone()
            ):
                raise AssertionError("reports are merged before they come here")
            case _:
                assert_never(message)

    def _raised(self, key: WorkerId, stream: WorkerStream, message: worker_messages.Raised) -> None:
        epoch, generation, rank = key
        now = self._run.clock.now()
        stream.failed = True
        if message.damaged:
            self._damaged(message.damaged, message.message)
            self._run.emit(e.CheckpointGone(at=now, folder=message.damaged))
        if message.lost_snapshot is not None:
            self._run.observer.say(f"{message.message}; the one before it, or the newest in storage, is used")
            self._run.emit(e.SnapshotDamaged(at=now, snapshot=message.lost_snapshot))
        failure = Failure(
            _kind_of(message),
            self._run.engine.time_here(stream.assignment.host, message.at),
            message.message,
            rank=rank,
            host=stream.assignment.host,
            echo=message.echo,
            traceback=message.traceback,
        )
        self._run.emit(e.WorkerFailed(at=now, epoch=epoch, generation=generation, rank=rank, failure=failure))

    def _damaged(self, folder: str, reason: str) -> None:
        if folder in self._run.history.checkpoints:
            self._run.observer.say(f"{reason}; the one before it is used")
            self._run.write(records.Damaged(self._run.clock.now(), folder, reason))

    # ------------------------------------------------------------------ how they end

    def exited(self, host: HostId, message: wire.Exited) -> None:
        key = WorkerId(message.epoch, message.generation, message.rank)
        self._workers.results.tails[key] = message
        stream = self._workers.streams.get(key)
        for index in sorted(stream.bound) if stream is not None else ():
            self._upload_failed(key, index, "its process ended before its upload was done")
        # A worker that has reported a failure may be killed before it exits.
        failed = (stream is not None and stream.failed) or (not message.by_us and message.code != 0)
        if stream is not None and not (message.by_us or stream.failed or stream.returned):
            stream.failed = True
            at = self._run.engine.time_here(host, message.at)
            failure = failure_of(message, host, at, self._run.job.backend)
            self._run.emit(
                e.WorkerFailed(
                    at=self._run.clock.now(),
                    epoch=message.epoch,
                    generation=message.generation,
                    rank=message.rank,
                    failure=failure,
                )
            )
        if failed and not self._run.job.store.is_local:  # else logs lie in the run's storage
            name = Path(message.log_path).relative_to(self._run.job.logs).as_posix()
            self._run.keep_file(f"logs/{name}", message.log_tail.encode(), "the log of a failed rank")

    def uploaded(self, message: wire.Uploaded) -> None:
        """An agent has written a snapshot to storage, or what its worker did not live to upload."""
        key = WorkerId(message.epoch, message.generation, message.rank)
        stream = self._workers.streams.get(key)
        if stream is None:
            return
        if message.part is None:
            self._upload_failed(key, message.index, message.reason)
        else:
            self._emit_reports(key, stream, _Batch(stream.upto, parts=self._new_parts(stream, message.part)))

    def _upload_failed(self, key: WorkerId, index: int, reason: str) -> None:
        epoch, generation, rank = key
        self._run.observer.say(
            f"rank {rank} could not save its part of checkpoint {index}: {reason}; training goes on"
        )
        stream = self._workers.streams.get(key)
        if stream is not None:
            of = Incarnation(epoch, stream.assignment.group_id, generation)
            self._run.unsaved.failed(of, index, f"rank {rank}: {reason}")
            self._run.observer.unsaved(of, index)
        self._run.emit(
            e.UploadFailed(
                at=self._run.clock.now(),
                epoch=epoch,
                generation=generation,
                rank=rank,
                index=index,
                reason=reason,
            )
        )
        self._workers.send(epoch, [rank], worker_messages.CheckpointSettled("", index))


def _kind_of(message: worker_messages.Raised) -> Kind:
    if message.final:
        return Kind.LIMIT
    # What it was given to start from is no fault of the function's.
    return Kind.START if message.damaged or message.lost_snapshot is not None else Kind.EXCEPTION
