"""How fast the workers get on, and what holds them up: snapshots, checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from everstep.agent import words
from everstep.driver.observer import Incarnation
from everstep.driver.stalls import Stalls
from everstep.driver.states import SnapshotCadence
from everstep.driver.streams import WorkerStream


class Tempo:
    """What workers say of their own time, and who wants to know it."""

    def __init__(self, cadence: SnapshotCadence, stalls: Stalls) -> None:
        self.cadence = cadence
        self.stalls = stalls

    def restart(self, epoch: int, now: float) -> None:
        """Workers start."""
        self.cadence.restart()
        self.stalls.restart(epoch, now)

    def heard(
        self,
        epoch: int,
        stream: WorkerStream,
        word: words.Report | words.Copied | words.Stalled,
        peers: Callable[[], list[WorkerStream]],
        now: float,
    ) -> None:
        """``peers``: all that there are, in whatever replica group."""
        rank = stream.assignment.rank
        match word:
            case words.Report():
                self.cadence.reported(rank, word.index, word.copy_s, now)
            case words.Copied():
                self.cadence.copied(rank, word.copy_s, word.whole_s)
            case words.Stalled():
                number = stream.assignment.group_id
                others = [p.upto for p in peers() if p is not stream and p.assignment.group_id == number]
                of = Incarnation(epoch, number, stream.generation)
                self.stalls.heard(of, word.index, word.seconds, now, others)
