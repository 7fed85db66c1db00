"""Snapshots in the memory of hosts: which one every rank has, and which of them ranks may write over.

A rank that has taken a snapshot keeps it, and the one before, until it is told what becomes of it: every rank
has it (then it is what is kept, and the one before may go), or some rank has passed that report without it
(then it goes itself). So at every instant there is one that all ranks have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from everstep.topology.slices import HostId


class At(NamedTuple):
    """The report that a snapshot was taken in: later ones are newer."""

    epoch: int
    report: int


_NO_MORE = At(1 << 62, 0)


class Copy(msgspec.Struct, frozen=True):
    """A snapshot of one rank, whole, in the memory of a host."""

    rank: int
    host: HostId
    epoch: int
    index: int
    ranks: int
    """How many ranks took one together."""


class Verdict(NamedTuple):
    """What is to be told to these ranks: ``kept`` stays; of those up to ``upto`` nothing else is needed."""

    ranks: tuple[int, ...]
    kept: At | None
    upto: At


class Snapshots:
    """Of one group of ranks that restarts as a whole."""

    def __init__(self) -> None:
        self.kept: At | None = None
        """The newest that every rank has."""
        self.places: dict[int, HostId] = {}
        """Whose memory has each rank's share of that."""
        self.since: float | None = None
        """When the last rank had it; None: not known."""
        self._members: dict[int, HostId] = {}
        self._holders: dict[At, set[int]] = {}
        """Newer ones, which not every rank has."""
        self._upto: dict[int, At] = {}
        self._copying: dict[int, At] = {}
        """The last that each rank began to take, and went on training: it has it a while after its report."""

    def begin(self, members: Mapping[int, HostId]) -> At | None:
        """These ranks start. Returns what they can all restore from the memory of their own host."""
        if self.places != members:
            self.forget()
        self._members = dict(members)
        self._holders.clear()
        self._upto.clear()
        self._copying.clear()
        return self.kept

    def adopt(self, members: Mapping[int, HostId], copies: Iterable[Copy]) -> list[Verdict]:
        """The ranks of an earlier driver, and what their hosts have."""
        self.begin(members)
        for copy in copies:
            if members.get(copy.rank) == copy.host and copy.ranks == len(members):
                self._holders.setdefault(At(copy.epoch, copy.index), set()).add(copy.rank)
        whole = [at for at in self._holders if self._is_whole(at)]
        return [self._keep(max(whole), None)] if whole else []

    def reported(
        self, rank: int, at: At, copied: Collection[At], now: float, copying: Collection[At] = ()
    ) -> list[Verdict]:
        """A rank has come to a report, and has these snapshots of the reports up to it. ``copying``: it will
        say later that it has these.
        """
        if rank not in self._members:
            return []
        verdicts = []
        if copying:
            self._copying[rank] = max(copying)
        for copy in sorted(copied):
            if self.kept is None or copy > self.kept:
                self._holders.setdefault(copy, set()).add(rank)
                if self._is_whole(copy):
                    verdicts.append(self._keep(copy, now))
        self._upto[rank] = max(at, self._upto.get(rank, at))
        return verdicts + self._give_up_missed()

    def returned(self, rank: int) -> list[Verdict]:
        """It takes no more of them."""
        if rank not in self._members:
            return []
        self._upto[rank] = _NO_MORE
        return self._give_up_missed()

    def _is_whole(self, at: At) -> bool:
        return len(self._holders[at]) == len(self._members)

    def _keep(self, at: At, now: float | None) -> Verdict:
        self.kept, self.since = at, now
        self.places = dict(self._members)
        self._holders = {other: ranks for other, ranks in self._holders.items() if other > at}
        return Verdict(tuple(sorted(self._members)), at, at)

    def _give_up_missed(self) -> list[Verdict]:
        """Of those that a rank has passed without taking one, there will never be all."""
        verdicts = []
        for at, holders in sorted(self._holders.items()):
            if any(self._has_missed(rank, at) for rank in self._upto):
                del self._holders[at]
                verdicts.append(Verdict(tuple(sorted(holders)), self.kept, at))
        return verdicts

    def _has_missed(self, rank: int, at: At) -> bool:
        passed = self._upto[rank] >= at and rank not in self._holders[at]
        # One that has returned has finished all that it had begun.
        return passed and (self._copying.get(rank) != at or self._upto[rank] == _NO_MORE)

    def host_lost(self, host: HostId) -> None:
        """Its memory is gone, and so is what it says late of what it had there."""
        if host in self.places.values():
            self.forget()
        if host in self._members.values():
            self._members = {}
            self._holders.clear()

    def forget(self) -> None:
        """What was kept can't be restored."""
        self.kept = self.since = None
        self.places = {}
