"""Who is slower than its peers: what workers say of their steps, and what the journal is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from everstep.health.stragglers import Pace, Straggler, Stragglers
from everstep.journal import records
from everstep.journal.records import RECOVERED, RESTARTED
from everstep.observe.display import in_short
from everstep.topology.placement import Assignment

LEAST_S = 3.0
"""Nobody is called slow for what it did in less time: a machine has its moments."""
_LONE = -1
"""The peers of ranks that are a replica group of their own: all ranks of that kind."""


class StragglerWatch:
    """Ranks of a replica group are compared with each other. Nothing is done about a slow one but to say so,
    once, and once more when it is over.
    """

    def __init__(self, tell: Callable[[records.StragglerSeen], None]) -> None:
        self._tell = tell
        self._epoch = 0
        self._peers: dict[int, Stragglers] = {}
        self._of: dict[int, Assignment] = {}
        self._heard: dict[int, int] = {}
        """How often, of ranks whose peers may have begun at another time."""

    def begin(
        self,
        epoch: int,
        everybody: Iterable[Assignment],
        started: set[int],
        now: float,
        named: Sequence[Straggler] = (),
    ) -> None:
        """Some ranks start, or all; the others go on. ``named``: those of whom an earlier driver has told."""
        known = [*named, *(one for peers in self._peers.values() for one in peers.named)]
        for one in known:
            if started.intersection(one.ranks):
                self._say(one, now, RESTARTED)
        self._epoch, self._of = epoch, {a.rank: a for a in everybody}
        kept = [one for one in known if not started.intersection(one.ranks)]
        before, self._peers = self._peers, {}
        for key in {*map(_key, self._of.values())}:
            hosts = {rank: a.host for rank, a in self._of.items() if _key(a) == key}
            if key in before and not started.intersection(hosts):
                self._peers[key] = before[key]
            else:
                self._peers[key] = Stragglers(hosts, LEAST_S, kept)
                self._heard.update(dict.fromkeys(hosts, 0))

    def paced(self, rank: int, index: int, pace: Pace, now: float) -> None:
        """What a rank's steps took, up to this report."""
        of = self._of.get(rank)
        if of is None:
            return
        self._heard[rank] += 1
        number = index if of.group_size > 1 else self._heard[rank]
        slow, over = self._peers[_key(of)].add(rank, number, pace)
        for one in slow:
            self._say(one, now)
        for one in over:
            self._say(one, now, RECOVERED)

    def note_of(self, rank: int) -> str:
        """What there is to say of this rank, in short."""
        of = self._of.get(rank)
        named = self._peers[_key(of)].named if of is not None else []
        return next((in_short(one.slower, one.kind) for one in named if rank in one.ranks), "")

    def _say(self, one: Straggler, now: float, over: str = "") -> None:
        host = self._of[one.ranks[0]].host if one.ranks[0] in self._of else ""
        self._tell(records.StragglerSeen(now, self._epoch, one.ranks, host, one.kind, one.slower, over))


def _key(of: Assignment) -> int:
    return of.group_id if of.group_size > 1 else _LONE
