"""Who is steadily slower than its peers, and at what.

Ranks that wait for each other have steps of the same length, however slow one of them is. So what is compared
is not how long a rank's steps take, but how much of them is its own: all but its waiting for others. Seconds
are by each rank's own clock, and never compared with another clock's.

A wrong name costs more than a missed one: a rank is named only if its excess is large, beyond what the noise
of its own steps explains, and if it is what the others wait for.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

WINDOW = 18
"""Samples that a rank is judged by: steps, or several steps where they are short."""
_SLOW = 0.12
"""A rank that works longer than its peers by this share is slow. Below half of it, it isn't any more."""
_SURE = 8.0
"""An excess counts only if it is this many times its own uncertainty."""
_STEADY = WINDOW - 2
"""An excess counts only if it shows in this many samples of a window."""
_FILLED = 0.7
"""A slow rank works for at least this share of its steps: one that waits itself holds up nobody."""
_LEAST_S = 1e-6
"""Excesses are relative to at least this: steps may take no time at all."""
_MOST_KEPT = 1 << 14
"""Paces that are kept until those of the other ranks for the same step come."""


class Slowness(enum.StrEnum):
    """What takes a straggler longer, as far as is known."""

    DATA = "waiting for data"
    COMPUTING = "computing"
    BUSY_HOST = "its host is busy"
    OTHER = "waiting for something else than data or other ranks"


class Pace(msgspec.Struct, frozen=True, array_like=True):
    """One rank's step, from the end of one report to the beginning of the next; or the mean of several.
    Seconds.
    """

    step: float
    ran: float
    """Its main thread computed, other than to load data."""
    queued: float
    """It could have computed, and got no processor."""
    data: float
    """It loaded data, or waited for it."""
    waited: float
    """For other ranks, as far as Everstep knows."""
    hides: bool
    """The rest may be waiting for other ranks as well: in a collective of a framework's."""
    steps: int = 1
    """That it is the mean of."""

    @property
    def rest(self) -> float:
        return max(0.0, self.step - self.ran - self.queued - self.data - self.waited)

    @property
    def work(self) -> float:
        """What is its own, but for a busy host."""
        return self.ran + self.data + (0.0 if self.hides else self.rest)


class Straggler(msgspec.Struct, frozen=True):
    """These ranks, or if several all of their host, are slower than the others by this share."""

    ranks: tuple[int, ...]
    kind: Slowness
    slower: float


class _Excess:
    """By which share of their time something exceeds its peers, in the last samples. More than 100 % counts
    as 100 %, so that one long step doesn't outweigh many.
    """

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._sum = 0.0

    def add(self, share: float) -> None:
        if len(self._shares) == WINDOW:
            self._sum -= _cut(self._shares[0])
        self._shares.append(share)
        self._sum += _cut(share)

    @property
    def mean(self) -> float:
        return self._sum / len(self._shares)

    def middle(self) -> float:
        return _middle(sorted(self._shares))

    def is_sure(self) -> bool:
        """Whether it is more than the noise of these samples explains, and in nearly all of them."""
        found, mean = [*map(_cut, self._shares)], self.mean
        spread = math.sqrt(sum((one - mean) ** 2 for one in found) / (len(found) - 1))
        steady = sum(one > _SLOW / 2 for one in found) >= _STEADY
        return steady and mean >= _SURE * spread / math.sqrt(len(found))


def _cut(share: float) -> float:
    return max(-1.0, min(1.0, share))


Step = Mapping[int, Pace]
"""One step of every rank."""
_Subject = tuple[bool, tuple[int, ...]]
"""Who is judged: (whether it is a host, its ranks)."""


class Stragglers:
    """The stragglers among workers that do the same. ``add`` takes in the pace of one worker, and returns who
    has become slow and who is as fast as the others again.
    """

    def __init__(self, hosts: Mapping[int, str], least_s: float, named: Iterable[Straggler] = ()) -> None:
        """``hosts``: of all ranks. ``least_s``: no rank is judged by a shorter time. ``named``: the
        stragglers that are known already.
        """
        self._hosts = {
            host: tuple(sorted(r for r in hosts if hosts[r] == host)) for host in {*hosts.values()}
        }
        self._ranks = frozenset(hosts)
        self._least_s = least_s
        self._coming: dict[int, dict[int, Pace]] = {}
        """Steps that some ranks have not reported yet, or never will."""
        self._steps: deque[Step] = deque(maxlen=WINDOW)
        self._excess: dict[_Subject, _Excess] = {}
        """Of each rank, and of each host that isn't the only one, in these steps."""
        self._named = {one.ranks: one for one in named if self._ranks.issuperset(one.ranks)}

    @property
    def named(self) -> list[Straggler]:
        return [*self._named.values()]

    def add(self, rank: int, number: int, pace: Pace) -> tuple[list[Straggler], list[Straggler]]:
        """(who is slow now, who isn't any more), by the ``number``-th step of this rank."""
        if len(self._ranks) < 2:
            return [], []
        step = self._coming.setdefault(number, {})
        step[rank] = pace
        if len(step) < len(self._ranks):
            if len(self._coming) * len(self._ranks) > _MOST_KEPT:
                del self._coming[next(iter(self._coming))]
            return [], []
        return self._judge(self._coming.pop(number))

    def _judge(self, step: Step) -> tuple[list[Straggler], list[Straggler]]:
        self._steps.append(step)
        work: dict[_Subject, float] = {(False, (rank,)): pace.work for rank, pace in step.items()}
        usual = _middle(sorted(work.values()))
        self._add_excess(work, None)
        if len(self._hosts) > 1:
            queued = {
                (True, ranks): sum(step[rank].queued for rank in ranks) / len(ranks)
                for ranks in self._hosts.values()
            }
            self._add_excess(queued, usual)
        if len(self._steps) < WINDOW:
            return [], []
        over = [one for one in self._named.values() if self._is_over(one)]
        for one in over:
            del self._named[one.ranks]
        new = []
        for of in self._excess:  # ranks before hosts, and nobody twice
            found = self._slow(of)
            if found is not None:
                self._named[found.ranks] = found
                new.append(found)
        return new, over

    def _add_excess(self, spent: Mapping[_Subject, float], usual: float | None) -> None:
        """By how much each exceeds the others, as a share of what they take, or of what is usual."""
        in_order = sorted(spent.values())
        for of, seconds in spent.items():
            others = _middle_without(in_order, seconds)
            share = (seconds - others) / max(others if usual is None else usual, _LEAST_S)
            if of not in self._excess:
                self._excess[of] = _Excess()
            self._excess[of].add(share)

    def _slow(self, of: _Subject) -> Straggler | None:
        excess, (is_host, ranks) = self._excess[of], of
        if excess.mean < _SLOW or not excess.is_sure():
            return None
        if any(set(ranks) & set(one) for one in self._named):
            return None
        paces = [[step[rank] for step in self._steps] for rank in ranks]
        spent = sum(pace.step * pace.steps for pace in paces[0])
        works = max(sum((pace.work + pace.queued) * pace.steps for pace in each) for each in paces)
        if spent < self._least_s or works < _FILLED * spent:
            return None
        kind = Slowness.BUSY_HOST if is_host else self._kind(ranks[0])
        return Straggler(ranks, kind, excess.middle())

    def _is_over(self, one: Straggler) -> bool:
        of = (one.kind is Slowness.BUSY_HOST, one.ranks)
        return of in self._excess and self._excess[of].mean < _SLOW / 2

    def _kind(self, rank: int) -> Slowness:
        """What this rank spends most on, beyond what its peers do."""

        def beyond(part: str) -> float:
            of = [{r: float(getattr(pace, part)) for r, pace in step.items()} for step in self._steps]
            return sum(each[rank] - _middle_without(sorted(each.values()), each[rank]) for each in of)

        parts = {Slowness.DATA: "data", Slowness.COMPUTING: "ran", Slowness.OTHER: "rest"}
        if next(iter(self._steps[-1].values())).hides:
            del parts[Slowness.OTHER]
        return max(parts, key=lambda kind: beyond(parts[kind]))


def _middle(in_order: Sequence[float]) -> float:
    half = len(in_order) // 2
    return in_order[half] if len(in_order) % 2 else (in_order[half - 1] + in_order[half]) / 2


def _middle_without(in_order: Sequence[float], one: float) -> float:
    """The median of the others."""
    at, left = bisect_left(in_order, one), len(in_order) - 1
    half = left // 2

    def other(index: int) -> float:
        return in_order[index if index < at else index + 1]

    return other(half) if left % 2 else (other(half - 1) + other(half)) / 2
