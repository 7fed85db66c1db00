"""``num_workers=0``: the training function runs in this process, for a debugger. No workers, no recovery;
reports and checkpoints are the same.

Processes that torchrun started are one group: rank 0 keeps the run, and the others tell it what they report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.backend.base import Endpoint, Member
from everstep.backend.launched import LaunchedGroup
from everstep.control.commands import Outcome
from everstep.driver.in_process_run import InProcessRun
from everstep.driver.launched_rank import LaunchedRankLink, agree, handle, stop_listening
from everstep.driver.questions import QUESTIONS
from everstep.driver.result import Result, result_of
from everstep.driver.states import StatesDue
from everstep.driver.synchronized import SynchronizedValues
from everstep.errors import (
    StorageError,
    TrainingFailedError,
    WorkerError,
    WorkerGroupError,
)
from everstep.identity import Incarnation
from everstep.journal import records
from everstep.journal.history import plain_value, read_history
from everstep.journal.lease import Lease
from everstep.process.current import enter
from everstep.protocol import framing, wire, worker_messages
from everstep.protocol.metrics import NO_METRICS
from everstep.saved.reports import ReportBook, Settled
from everstep.storage.store import Limits, Store, open_store
from everstep.topology.placement import Assignment
from everstep.worker import session as sessions

if TYPE_CHECKING:
    from everstep.driver.run import RunSpec

_ALONE = Member(0, 1, 0, 1, 0, 1)


class Opening(msgspec.Struct, frozen=True):
    """From rank 0 to the others, before they start."""

    name: str
    epoch: int
    checkpoint: str | None
    finished: bool = False
    """The run is over already: there is nothing to train."""

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)


@dataclass(frozen=True)
class _Question:
    """Of another rank, about checkpoints."""

    rank: int
    seq: int
    what: str
    upto: int
    """The last report of the rank that asks."""


class InProcessLink:
    """A link whose other end is this process: what a driver does about reports is done here, at once."""

    def __init__(self, run: InProcessRun, group: LaunchedGroup | None) -> None:
        self.run = run
        self._group = group
        self._changed = threading.Condition()
        self._questions: list[_Question] = []
        """Of other ranks, until their own reports are dealt with."""
        self.failure: Exception | None = None
        """What ends the run, and could not be raised where it was found."""
        self._metrics: dict[int, msgspec.Raw] = {}
        """Of rank 0's reports, by index."""
        world = group.member.world_size if group is not None else 1
        self._book = ReportBook(frozenset(range(world)))
        self._listeners = [
            threading.Thread(target=self._listen, args=(rank,), name=f"everstep-rank-{rank}", daemon=True)
            for rank in range(1, world)
        ]
        self.session: sessions.Session | None = None
        self._synchronized = SynchronizedValues(self._send, 0)
        self._synchronized.restart(0, {0: range(world)})
        self._states = StatesDue(run.config.storage_every_s, self._synchronized.propose)
        self._states.restart(time.monotonic())

    def _propose_if_due(self) -> None:
        self._states.look(time.monotonic())

    def _send(self, epoch: int, ranks: list[int], message: worker_messages.AnyToWorker) -> None:
        for rank in ranks:
            if rank == 0 and self.session is not None:
                handle(self.session, message, self.send)
            elif rank > 0 and self._group is not None:
                self._group.send_to(rank, framing.frame(message))

    # ------------------------------------------------------------------ what ranks say

    def listen(self) -> None:
        """Hear the other ranks from now on."""
        for thread in self._listeners:
            thread.start()

    def _listen(self, rank: int) -> None:
        assert self._group is not None
        for frame in self._group.messages_from(rank):
            if self._received(rank, frame):
                return

    def send(self, frame: bytes) -> None:
        self._received(0, frame)
        self._raise_failure()

    def _received(self, rank: int, frame: bytes) -> bool:
        """Whether that was the last that this rank had to say."""
        returned = False
        with self._changed:  # the function's thread reports, the one that uploads, and other ranks
            for body in framing.Frames().feed(frame):
                message = worker_messages.from_worker.decode(body)
                try:
                    self._settle(self._take_in(rank, message))
                except Exception as error:  # on a thread of ours: raised by what the function calls next
                    self.failure = self.failure or error
                returned = returned or isinstance(message, worker_messages.Returned)
            self._answer()
            self._changed.notify_all()
        return returned

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _take_in(self, rank: int, message: worker_messages.AnyFromWorker) -> Settled:
        match message:
            case worker_messages.Report() as report:
                if rank == 0:
                    if not report.silent:
                        self.run.write(records.Metrics(self.run.epoch, report.index, [report.metrics]))
                    self._metrics[report.index] = report.metrics
                    self._propose_if_due()
                owed = (report.index,) if report.owed else ()
                parts = (report.part,) if report.part is not None else ()
                return self._book.reported(rank, report.index, owed, parts)
            case worker_messages.StallReported() as stalled:
                self.run.stalls.add(
                    Incarnation(self.run.epoch, 0, 0), stalled.index, stalled.seconds, time.monotonic()
                )
                self.run.stalls.flush(time.monotonic())
                return Settled()
            case worker_messages.PartDone() as done:
                return self._book.reported(rank, 0, (), (done.part,))
            case worker_messages.PartFailed() as failed:
                self.run.say(f"checkpoint {failed.index} could not be saved: {failed.reason}")
                self._dealt_with("", failed.index)
                return self._book.upload_failed(rank, failed.index)
            case worker_messages.Counted() as counted:
                self._synchronized.counted(rank, counted)
                return Settled()
            case worker_messages.Returned():
                self._synchronized.returned(rank)
                return self._book.returned(rank)
            case worker_messages.Question() as ask:
                upto = msgspec.msgpack.decode(ask.body, type=int)
                self._questions.append(_Question(rank, ask.seq, ask.what, upto))
                return Settled()
            case _:
                return Settled()

    def ask(self, what: str, body: bytes, timeout_s: float | None) -> bytes:
        if what not in QUESTIONS:
            return agree(what, body, self._group) if self._group is not None else body
        upto = msgspec.msgpack.decode(body, type=int)
        with self._changed:
            is_due = self._changed.wait_for(lambda: self.failure or self._is_due(what, upto), timeout_s)
            self._raise_failure()
            if not is_due:
                raise TimeoutError
            return self.run.listed(what)

    def _is_due(self, what: str, upto: int) -> bool:
        """Commits are made as soon as the last part comes: there are none under way."""
        if what == "validated" and self.run.history.pending():
            return False
        return self._book.has_all(upto) and (what == "newest" or not self._book.is_uploading(upto))

    def _answer(self) -> None:
        """Answer the other ranks' questions that need not wait any more."""
        due = [question for question in self._questions if self._is_due(question.what, question.upto)]
        self._questions = [question for question in self._questions if question not in due]
        for question in due:
            assert self._group is not None
            answer = worker_messages.Answer(question.seq, self.run.listed(question.what))
            self._group.send_to(question.rank, framing.frame(answer))

    # ------------------------------------------------------------------ what comes of it

    def _settle(self, settled: Settled) -> None:
        for ready in settled.ready:
            self.run.commit(ready, self._metrics.get(ready.index, NO_METRICS))
            self._dealt_with(ready.folder, ready.index)
            self.run.retain()

    def _dealt_with(self, folder: str, index: int) -> None:
        """No rank waits for this checkpoint any more."""
        if self.session is not None:
            self.session.committed(index)
        self._send_to_others(worker_messages.CheckpointSettled(folder, index))

    def _send_to_others(self, message: worker_messages.AnyToWorker) -> None:
        if self._group is not None:
            self._send(self.run.epoch, list(range(1, self._group.member.world_size)), message)

    def finish(self) -> None:
        """This rank has returned; wait for the others, whose parts may still be missing."""
        self.send(framing.frame(worker_messages.Returned(None)))
        for thread in self._listeners:
            thread.join()
        self._raise_failure()

    def close(self, closed: records.Closed) -> None:
        self.run.close(closed)
        self._send_to_others(worker_messages.Undriven(True))

    def stop(self) -> None:
        stop_listening(self._group, self._listeners)


def run_in_process(
    spec: RunSpec,
    name: str,
    store: Store,
    lease: Lease,
    say: Callable[[str], None],
    group: LaunchedGroup | None = None,
) -> Result:
    """As the only rank, or as rank 0 of a group that was launched."""
    history = lease.history
    kept = InProcessRun(store, lease, spec, say)
    kept.put_in_order()
    kept.begin(history.last_epoch + 1)
    link = InProcessLink(kept, group)
    newest = history.newest
    opening = Opening(name, kept.epoch, newest.ref.folder if newest is not None else None)
    if group is not None:
        group.share(opening.encoded())
    session = sessions.Session(_worker(spec, store, opening, group), link)
    link.session = session
    link.listen()
    outcome, message, value = Outcome.FAILED, "", None
    try:
        value = _train(spec, session, group)
        link.finish()
        outcome = Outcome.FINISHED
    except KeyboardInterrupt:
        outcome = Outcome.STOPPED
        raise
    except Exception as error:
        ended_by = _as_failure(link.failure) if link.failure is not None else error
        message = framing.described(ended_by.__cause__ or ended_by)
        raise ended_by from ended_by.__cause__
    finally:
        try:
            link.close(records.Closed(time.monotonic(), outcome.value, message, plain_value(value)))
        finally:
            link.stop()
    return replace(result_of(store, history, spec.run.storage_options), return_value=value)


def _as_failure(error: Exception) -> Exception:
    """What all ranks' reports came to is no fault of one rank's function."""
    if not isinstance(error, StorageError):
        return error
    failure = TrainingFailedError(f"Training failed: {error}")
    failure.__cause__ = error
    return failure


def run_launched_rank(spec: RunSpec, group: LaunchedGroup) -> Result:
    """As another rank than 0 of a group that was launched: rank 0 keeps the run."""
    opening = msgspec.msgpack.decode(group.share(b""), type=Opening)
    limits = Limits.of(spec.run.deadlines)
    run = open_store(spec.run.storage_path, spec.run.storage_options, limits).child(opening.name)
    if opening.finished:
        return result_of(run, read_history(run), spec.run.storage_options)
    link = LaunchedRankLink(group)
    session = sessions.Session(_worker(spec, run, opening, group), link)
    link.session = session
    link.listen()
    try:
        value = _train(spec, session, group)
        link.finish()
    finally:
        link.stop()
    history = read_history(run)
    if history.outcome != Outcome.FINISHED.value:
        raise TrainingFailedError(f"Training failed at rank 0: {history.message or history.outcome}")
    return replace(result_of(run, history, spec.run.storage_options), return_value=value)


def _train(spec: RunSpec, session: sessions.Session, group: LaunchedGroup | None) -> Any:
    """What a worker does, in this process."""
    member = session.spec.member
    enter(session)
    try:
        endpoint: Endpoint = spec.backend.host(member) if group is None else group.endpoint
        spec.backend.join(member, endpoint, spec.run.deadlines.start_s)
        session.hand_over(spec.datasets)
        value = _returned(spec)
        session.reporting.finish()
        spec.backend.leave(member)
    except Exception as error:  # the function may raise anything; it stays attached, for the debugger
        failure = WorkerError(member.rank, "this process", f"raised {framing.described(error)}")
        why = "num_workers=0 runs once, without recovery"
        raise WorkerGroupError(why, {member.rank: failure}, member.rank) from error
    finally:
        enter(None)
    return value


def _returned(spec: RunSpec) -> Any:
    """What the function returns. It may end with ``sys.exit()``, too, as in a worker."""
    config = spec.train_loop_config
    try:
        return spec.train_fn() if config is None else spec.train_fn(dict(config))
    except SystemExit as error:
        if error.code:
            raise
        return None


def _worker(spec: RunSpec, store: Store, opening: Opening, group: LaunchedGroup | None) -> wire.WorkerSpec:
    limits = spec.run.deadlines
    member = group.member if group is not None else _ALONE
    here = Assignment(
        rank=member.rank,
        host="here",
        local_rank=member.local_rank,
        local_world_size=member.local_world_size,
        node_rank=member.node_rank,
        num_nodes=member.num_nodes,
        world_size=member.world_size,
        slice="here",
        slice_id=0,
        num_slices=1,
        group_id=0,
        num_groups=1,
        group_rank=member.group_rank,
        group_size=member.group_size,
    )
    return wire.WorkerSpec(
        run_name=opening.name,
        run_folder=store.address(),
        epoch=opening.epoch,
        generation=0,
        assignment=here,
        member=member,
        checkpoint=opening.checkpoint,
        reason="resumed" if opening.epoch > 1 else "first start",
        log_path="",
        seed=0,
        start_timeout_s=limits.start_s,
        leave_timeout_s=limits.leave_s,
        hold_s=0.0,
        report_wait_s=limits.report_wait_s,
        all_metrics=False,
        echo=False,
        storage_options=dict(spec.run.storage_options or {}),
        storage_limits=Limits.of(limits),
        validates=spec.validation is not None,
    )
