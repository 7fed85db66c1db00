"""The workers, as the driver knows them: which there are, messages to them, and what their agents
may forget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle

from everstep.control import commands as c, events as e
from everstep.control.table import Phase
from everstep.driver.collectives import Collectives
from everstep.driver.driven import DrivenRun
from everstep.driver.notices import NoticesToWorkers
from everstep.driver.pace import WorkerPace
from everstep.driver.questions import CheckpointQuestions
from everstep.driver.run_metrics import RunMetrics
from everstep.driver.stalls import Stalls
from everstep.driver.states import SnapshotCadence
from everstep.driver.stragglers import StragglerWatch
from everstep.driver.streams import WorkerStream
from everstep.driver.synchronized import SynchronizedValues
from everstep.health.stragglers import Straggler
from everstep.identity import WorkerId
from everstep.observe.registry import LiveWorker
from everstep.process.clock import Clock
from everstep.protocol import framing, wire, worker_messages
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId


class Workers:
    """The workers, what they share through the driver, and how messages find them."""

    def __init__(self, run: DrivenRun) -> None:
        self._run = run
        self.streams: dict[WorkerId, WorkerStream] = {}
        self.pids: dict[int, int] = {}
        self._asked = c.AskReason.NONE
        self.metrics = RunMetrics(run.write)
        self.results = Results()
        self.talk = Talk(self.send, run.precedence, run.clock)
        job = run.job
        grouped = job.scaling.replica_group_size is not None
        # With replica groups, a group that is replaced takes its state from the others.
        memory = None if grouped else job.run.checkpoint_config.memory
        self.pace = WorkerPace(
            SnapshotCadence(memory, self.talk.synchronized.propose, run.observer.say),
            Stalls(run.write, run.history.ledger),
            StragglerWatch(run.record),
        )
        self.questions = CheckpointQuestions(
            self.send, run.controller, run.history, job.store, job.run.checkpoint_config, run.clock
        )

    # ------------------------------------------------------------------ who they are

    def current(self) -> list[WorkerStream]:
        epoch = self._run.controller.epoch
        return [stream for (e_, _, _), stream in self.streams.items() if e_ == epoch]

    def have_reported(self) -> bool:
        """Whether any has in this attempt."""
        return any(stream.upto for stream in self.current())

    def live(self) -> list[LiveWorker]:
        return [
            LiveWorker(
                a.rank,
                self.pids.get(a.rank, 0),
                a.host,
                a.slice,
                note=self.pace.stragglers.note_of(a.rank),
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
            self.metrics.restart()
            self.talk.synchronized.restart(command.epoch, {})
        generations = dict(command.generations)
        for a in command.assignments:
            generation = generations[a.group_id]
            self.streams[WorkerId(command.epoch, generation, a.rank)] = WorkerStream(a, generation)
        self.pace.start(command.epoch, self.streams.values(), ranks, self._run.clock.now())
        for group in generations:
            self.talk.meet(group, command.epoch, self.streams.values())
            members = [a.rank for a in command.assignments if a.group_id == group]
            self.talk.synchronized.replace(group, members)
        return alone and bool(replaced)

    def adopt(self, streams: dict[WorkerId, WorkerStream], pids: dict[int, int], epoch: int) -> None:
        """Workers of an earlier driver."""
        self.streams, self.pids = streams, pids
        for stream in streams.values():
            stream.behind = True
        named = [Straggler(one.ranks, one.kind, one.slower) for one in self._run.history.slow(epoch)]
        self.pace.adopt(epoch, streams.values(), named, self._run.clock.now())
        self.metrics.recall(self._run.history.reports(epoch))
        groups: dict[int, list[int]] = {}
        for stream in streams.values():
            groups.setdefault(stream.assignment.group_id, []).append(stream.assignment.rank)
        for group in groups:
            self.talk.meet(group, epoch, streams.values())
            members = [stream for stream in streams.values() if stream.assignment.group_id == group]
            # A rank's messages may be repeated although they have been dealt with, as another rank's show.
            settled = sorted({index for stream in members for index in stream.settled})
            for stream in members:
                stream.settled.extend(settled)
        self.talk.synchronized.restart(epoch, groups)

    def stopping(self, command: c.StopWorkers) -> None:
        for rank in command.ranks:
            if stream := self.streams.get(WorkerId(command.epoch, command.generation, rank)):
                stream.stopped = True

    def retired(self, host: HostId) -> None:
        """The host counts as lost. Workers that were to start there must not, should it come back."""
        for stream in self.current():
            if stream.assignment.host == host:
                stream.stopped = True

    def wanted(self, specs: list[wire.WorkerSpec]) -> list[wire.WorkerSpec]:
        """Those of them that have not been stopped meanwhile."""
        keys = [WorkerId(spec.epoch, spec.generation, spec.member.rank) for spec in specs]
        streams = [self.streams.get(key) for key in keys]
        return [spec for spec, s in zip(specs, streams, strict=True) if s is not None and not s.stopped]

    def write_places(self, assignments: Iterable[Assignment], others_stay: bool) -> None:
        placed = self._run.history.placed(self._run.clock.now(), assignments, others_stay)
        if placed is not None:
            self._run.write(placed)

    # ------------------------------------------------------------------ messages to them

    def send(self, epoch: int, ranks: list[int], message: worker_messages.AnyToWorker) -> None:
        body = framing.frame(message)
        by_host: dict[HostId, list[int]] = {}
        for stream in self.current():
            if stream.assignment.rank in ranks:
                by_host.setdefault(stream.assignment.host, []).append(stream.assignment.rank)
        for host, some in by_host.items():
            self._run.engine.send(host, wire.ToWorkers(self._run.precedence, epoch, some, body))

    def noticed(self, host: HostId, grace_s: float | None) -> None:
        now = self._run.clock.now()
        deadline = None if grace_s is None else now + grace_s
        self.talk.notices.set(host, deadline)
        if deadline is None:
            self._run.emit(e.NoticeCancelled(at=now, host=host))
        else:
            self._run.emit(e.PreemptionNotice(at=now, host=host, deadline=deadline))
        self._propose_notices()

    def notice_is_over(self, slice_: str) -> None:
        gone = {s.assignment.host for s in self.current() if s.assignment.slice == slice_}
        self.talk.notices.forget(gone)
        self._propose_notices()

    def _propose_notices(self) -> None:
        if self._run.controller.phase is Phase.RUNNING:  # else they get them when they train
            self.talk.notices.propose(self.current())

    def update_newcomers(self) -> None:
        """Workers that have just started know nothing yet of what is pending."""
        if self.talk.notices.concern(self.current()):
            self._propose_notices()
        if self._asked is not c.AskReason.NONE:
            self.ask(self._asked)

    def ask(self, reason: c.AskReason) -> None:
        """Ask them for a checkpoint, for this reason; or (``NONE``) take that back."""
        self._asked = reason
        self.talk.synchronized.propose(worker_messages.WantCheckpoint(reason.value))

    def acknowledgements(self) -> list[tuple[HostId, wire.Acknowledge]]:
        """What agents need not keep once all that is written now is durable."""
        by_host: dict[HostId, list[tuple[int, int, int, bytes]]] = {}
        for (_, generation, rank), stream in self.streams.items():
            if not stream.has_news:
                continue
            number = stream.assignment.group_id
            group = self._run.controller.groups.get(number)
            if group is None or group.generation != generation:
                continue
            awaited = self._run.controller.committing(group) | group.book.awaited(rank)
            unanswered = self.talk.unanswered(number, rank) | self.questions.unanswered(rank)
            stream.settle(awaited, unanswered)
            moved = stream.acknowledgement()
            if moved is not None:
                by_host.setdefault(stream.assignment.host, []).append((generation, rank, *moved))
        epoch = self._run.controller.epoch
        return [
            (host, wire.Acknowledge(self._run.precedence, epoch, ranks)) for host, ranks in by_host.items()
        ]


class Talk:
    """What the ranks agree on among each other, through the driver."""

    def __init__(
        self, send: Callable[[int, list[int], worker_messages.AnyToWorker], None], lease: int, clock: Clock
    ) -> None:
        self._send = send
        self.collectives: dict[int, Collectives] = {}
        """By replica group."""
        self.synchronized = SynchronizedValues(send, lease)
        self.notices = NoticesToWorkers(self.synchronized.propose, clock)

    def meet(self, group: int, epoch: int, streams: Any) -> None:
        """Collectives of this group count from here on; or from where an earlier driver has seen them."""
        members = [s for s in streams if s.assignment.group_id == group]
        collectives = self.collectives[group] = Collectives(self._send)
        returned = {s.assignment.rank for s in members if s.returned}
        collectives.restart(
            {s.assignment.rank for s in members}, epoch, max(s.turn for s in members), returned
        )

    def unanswered(self, group: int, rank: int) -> set[int]:
        """The numbers of this rank's collectives that are still to be answered."""
        return self.collectives[group].unanswered(rank)


class Results:
    """What workers leave behind: how they ended, and what they returned."""

    def __init__(self) -> None:
        self.tails: dict[WorkerId, wire.Exited] = {}
        """How workers ended, for the error."""
        self.value: Any = None
        """What rank 0 returned, or the leader of another group if rank 0's is not there at the end."""
        self.problem = ""
        """Why that can't be had, although the function returned something."""

    def returned(self, rank: int, message: worker_messages.Returned) -> None:
        if rank == 0 or self.value is None:
            value, problem = _loaded(message)
            if rank == 0 or value is not None or not self.problem:
                self.value, self.problem = value, problem


def _loaded(message: worker_messages.Returned) -> tuple[Any, str]:
    """(what a worker returned, why that can't be had). It comes from a process that this driver started, over
    a socket that only it has.
    """
    if message.value is None:
        return None, message.problem
    try:
        return cloudpickle.loads(message.value), ""
    except Exception as error:  # a class that isn't here, a device that isn't: anything may be raised
        return None, f"it can't be loaded in this process: {type(error).__name__}: {error}"
