"""How fast the workers get on, and what holds them up: snapshots, checkpoints, one that is slow."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.driver.stalls import Stalls
from everstep.driver.states import SnapshotCadence
from everstep.driver.stragglers import StragglerWatch
from everstep.driver.streams import WorkerStream
from everstep.health.stragglers import Straggler
from everstep.identity import Incarnation
from everstep.protocol import worker_messages


class WorkerPace:
    """Passes on what workers report of their own time."""

    def __init__(self, cadence: SnapshotCadence, stalls: Stalls, stragglers: StragglerWatch) -> None:
        self.cadence = cadence
        self.stalls = stalls
        self.stragglers = stragglers

    def start(self, epoch: int, streams: Iterable[WorkerStream], ranks: set[int], now: float) -> None:
        """These ranks start; the others go on."""
        self.cadence.restart()
        self.stalls.restart(epoch, now)
        self.stragglers.begin(epoch, [stream.assignment for stream in streams], ranks, now)

    def adopt(self, epoch: int, streams: Iterable[WorkerStream], named: list[Straggler], now: float) -> None:
        """Workers of an earlier driver go on."""
        self.cadence.adopt()
        self.stragglers.begin(epoch, [stream.assignment for stream in streams], set(), now, named)

    def reported(self, rank: int, report: worker_messages.Report, now: float) -> None:
        self.cadence.reported(rank, report.index, report.copy_s, now)
        if report.pace is not None:
            self.stragglers.paced(rank, report.index, report.pace, now)

    def stalled(
        self,
        epoch: int,
        stream: WorkerStream,
        message: worker_messages.StallReported,
        peers: Iterable[WorkerStream],
        now: float,
    ) -> None:
        """``peers``: all that there are, in all replica groups."""
        number = stream.assignment.group_id
        others = [p.upto for p in peers if p is not stream and p.assignment.group_id == number]
        of = Incarnation(epoch, number, stream.generation)
        self.stalls.add(of, message.index, message.seconds, now, others)
