"""What is told of workers: that they start, report, return, fail, and are gone."""

from __future__ import annotations

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.ending import Ending
from everstep.control.failures import BUDGET_OF, Failure, Kind
from everstep.control.group import Group
from everstep.control.moving import Moving
from everstep.control.recovery import Recovery, while_starting
from everstep.control.run import Run
from everstep.control.snapshots import At
from everstep.control.table import Phase
from everstep.topology.slices import HostId


class WorkerEvents:
    def __init__(self, run: Run, recovery: Recovery, moving: Moving, ending: Ending) -> None:
        self._run = run
        self._recovery = recovery
        self._moving = moving
        self._ending = ending

    def spawned(self, event: e.WorkerSpawned) -> None:
        group = self._run.current(event)
        if group is not None:
            self._recovery.starting.spawned(group, event.rank, event.at)

    def ready(self, event: e.WorkerReady) -> None:
        group = self._run.current(event)
        if group is not None and self._recovery.ready(group, event.rank, event.at):
            self._run.relocation.started(event.at)
            self._ending.check_finished(event.at)
            self._moving.reconsider(event.at)

    def reported(self, event: e.Reported) -> None:
        group = self._run.current(event)
        if group is None:
            return
        self._run.has_reported = True
        self._recovery.starting.stepped(group, event.rank, event.restore_s)
        self._copied(event)
        saved = (*event.owed, *(part.index for part in event.parts))
        self._run.checkpoints.reported((event.epoch, group.number, group.generation), saved, event.at)
        self._run.settle(group, group.book.reported(event.rank, event.upto, event.owed, event.parts))

    def _copied(self, event: e.Reported) -> None:
        snapshots = self._run.snapshots
        before = snapshots.kept
        copied = [At(event.epoch, index) for index in event.copied]
        copying = [At(event.epoch, index) for index in event.copying]
        upto = At(event.epoch, event.upto)
        self._run.pass_on(snapshots.reported(event.rank, upto, copied, event.at, copying))
        if snapshots.kept != before:
            self._recovery.progressed()

    def upload_failed(self, event: e.UploadFailed) -> None:
        group = self._run.current(event)
        if group is not None:
            self._run.settle(group, group.book.upload_failed(event.rank, event.index))

    def returned(self, event: e.WorkerReturned) -> None:
        run = self._run
        group = run.current(event)
        if group is None or event.rank in group.returned:
            return
        group.returned.add(event.rank)
        self._recovery.starting.stepped(group, event.rank, 0.0)
        run.pass_on(run.snapshots.returned(event.rank))
        run.settle(group, group.book.returned(event.rank))
        self._ending.check_finished(event.at)

    def failed(self, event: e.WorkerFailed) -> None:
        run, failure = self._run, event.failure
        group = run.current(event)
        if group is None or event.rank in group.returned or event.rank in group.gone:
            return
        group.failed.add(event.rank)
        if failure.kind is Kind.LIMIT and not run.over:
            run.do(c.FailureSeen(event.at, failure))
            self._ending.give_up(failure, (failure,), event.at)
            return
        if BUDGET_OF[failure.kind] is None:
            if run.trained:  # it has been loaded before: it must be this host
                failure = while_starting(failure)
        elif event.rank not in group.ready:
            failure = while_starting(failure)
        elif failure.kind is Kind.SIGNAL and group.members[event.rank].slice in run.fleet.noticed:
            # The machine that is being taken away ends its processes first.
            failure = msgspec.structs.replace(failure, kind=Kind.PREEMPTED)
        self._recovery.failed(failure, {group.number}, event.at)

    def gone(self, event: e.WorkersGone) -> None:
        run = self._run
        if event.epoch != run.epoch:
            return
        gone: set[int] = set()
        for group in run.groups.values():
            if group.generation == event.generation:
                gone |= event.ranks & group.left_on(event.host)
                group.gone |= gone & group.ranks
        if run.over:
            self._ending.gone(event.host, gone)
        else:
            self._gone(event.host, gone, event.at)

    def _gone(self, host: HostId, ranks: set[int], at: float) -> None:
        silent = self._died_without_a_word(ranks)
        for restart in self._run.restarts:
            left = restart.stopping.pop(host, frozenset()) - ranks
            if left:
                restart.stopping[host] = left
        if silent is not None:
            group, rank = silent
            failure = Failure(Kind.EXIT, at, "ended without a word", rank=rank, host=host)
            failure = failure if rank in group.ready else while_starting(failure)
            self._recovery.failed(failure, {group.number}, at)

    def _died_without_a_word(self, ranks: set[int]) -> tuple[Group, int] | None:
        """A rank that neither returned, nor failed, nor was told to end."""
        run = self._run
        told = {g for r in run.restarts if r.stage is not Phase.STARTING for g in r.groups}
        for rank in sorted(ranks):
            group = run.group_of(rank)
            if group is not None and rank not in group.returned and group.number not in told:
                return group, rank
        return None
