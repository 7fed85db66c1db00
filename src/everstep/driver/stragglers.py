"""Which workers are slower than their peers: their steps come in here, and records of it go to
the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from everstep.health.stragglers import Pace, Straggler, Stragglers
from everstep.journal import records
from everstep.journal.records import RECOVERED, RESTARTED
from everstep.observe.display import in_short
from everstep.topology.placement import Assignment

LEAST_S = 3.0
"""No rank is judged by less time: short delays are common on any machine."""
_LONE = -1
"""The peers of ranks that are a replica group of their own: all ranks of that kind."""


class StragglerWatch:
    """Ranks of a replica group are compared with each other. A slow one is only recorded, once, and once more
    when it is over.
    """

    def __init__(self, record: Callable[[records.StragglerSeen], None]) -> None:
        self._record = record
        self._epoch = 0
        self._peers: dict[int, Stragglers] = {}
        self._of: dict[int, Assignment] = {}
        self._samples: dict[int, int] = {}
        """How often, of ranks whose peers may have begun at another time."""

    def begin(
        self,
        epoch: int,
        everybody: Iterable[Assignment],
        started: set[int],
        now: float,
        named: Sequence[Straggler] = (),
    ) -> None:
        """Some ranks start, or all; the others go on. ``named``: those that an earlier driver has
        recorded.
        """
        known = [*named, *(one for peers in self._peers.values() for one in peers.named)]
        for one in known:
            if started.intersection(one.ranks):
                self._write(one, now, RESTARTED)
        self._epoch, self._of = epoch, {a.rank: a for a in everybody}
        kept = [one for one in known if not started.intersection(one.ranks)]
        before, self._peers = self._peers, {}
        for key in {*map(_key, self._of.values())}:
            hosts = {rank: a.host for rank, a in self._of.items() if _key(a) == key}
            if key in before and not started.intersection(hosts):
                self._peers[key] = before[key]
            else:
                self._peers[key] = Stragglers(hosts, LEAST_S, kept)
                self._samples.update(dict.fromkeys(hosts, 0))

    def paced(self, rank: int, index: int, pace: Pace, now: float) -> None:
        """What a rank's steps took, up to this report."""
        of = self._of.get(rank)
        if of is None:
            return
        self._samples[rank] += 1
        number = index if of.group_size > 1 else self._samples[rank]
        slow, over = self._peers[_key(of)].add(rank, number, pace)
        for one in slow:
            self._write(one, now)
        for one in over:
            self._write(one, now, RECOVERED)

    def note_of(self, rank: int) -> str:
        """What there is to say of this rank, in short."""
        of = self._of.get(rank)
        named = self._peers[_key(of)].named if of is not None else []
        return next((in_short(one.slower, one.kind) for one in named if rank in one.ranks), "")

    def _write(self, one: Straggler, now: float, over: str = "") -> None:
        host = self._of[one.ranks[0]].host if one.ranks[0] in self._of else ""
        self._record(records.StragglerSeen(now, self._epoch, one.ranks, host, one.kind, one.slower, over))


def _key(of: Assignment) -> int:
    return of.group_id if of.group_size > 1 else _LONE
