"""Snapshots in the memory of hosts: which one every rank has, where it lies, and what ranks may write over.

A rank that has taken a snapshot keeps it, and the one before, until it is told what becomes of it: every rank
has it (then it is what is kept, and the one before may go), or some rank has passed that report without it
(then it goes itself). So at every instant there is one that all ranks have.

Once every rank has one, it is copied to other hosts, of other slices where there are any. Until all copies
are there, the last one of which they are is kept as well: so at every instant there is one that outlives the
loss of a host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from everstep.topology.slices import HostId, SliceName


class At(NamedTuple):
    """The report that a snapshot was taken in: later ones are newer."""

    epoch: int
    report: int


_NO_MORE = At(1 << 62, 0)


class Copy(msgspec.Struct, frozen=True):
    """A snapshot of one rank, whole, in the memory of a host: its own, or a copy on another one."""

    rank: int
    host: HostId
    epoch: int
    index: int
    ranks: int
    """How many ranks took one together."""


class Verdict(NamedTuple):
    """What is to be told to these ranks: ``kept`` stay; of those up to ``upto`` nothing else is needed."""

    ranks: tuple[int, ...]
    kept: tuple[At, ...]
    """From the oldest to the newest."""
    upto: At
    hosts: tuple[HostId, ...] = ()
    """Those that have what isn't needed any more."""


class Transfer(NamedTuple):
    """A rank's snapshot is to be copied from one host to another."""

    rank: int
    source: HostId
    to: HostId
    at: At


class KnownSnapshot:
    """Which hosts have it, by rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        """How many took it together."""
        self.holders: dict[int, set[HostId]] = {}
        self.since: float | None = None
        """When the last rank had it; None: not known."""

    def add(self, rank: int, host: HostId) -> None:
        self.holders.setdefault(rank, set()).add(host)

    def lose(self, host: HostId) -> None:
        for hosts in self.holders.values():
            hosts.discard(host)

    @property
    def hosts(self) -> set[HostId]:
        return set().union(*self.holders.values())


class Snapshots:
    """Of one group of ranks that restarts as a whole. ``copies``: on how many other hosts each rank's is."""

    def __init__(self, copies: int = 0) -> None:
        self._copies = copies
        self.kept_all: tuple[At, ...] = ()
        """Those that may be needed, from the oldest to the newest. Each is whole."""
        self._known: dict[At, KnownSnapshot] = {}
        """These, and newer ones, which not every rank has."""
        self._safe: At | None = None
        """The newest of which all copies are there."""
        self._sending: At | None = None
        """The one that is being copied."""
        self._awaited: set[Transfer] = set()
        """What is still missing of that."""
        self._members: dict[int, HostId] = {}
        self._peers: dict[HostId, tuple[HostId, ...]] = {}
        self._lost: set[HostId] = set()
        self._upto: dict[int, At] = {}
        self._taking: dict[int, At] = {}
        """The last that each rank began to take, and went on training: it has it a while after its report."""

    @property
    def kept(self) -> At | None:
        """The newest of which every rank's is somewhere."""
        return self.kept_all[-1] if self.kept_all else None

    @property
    def hosts(self) -> set[HostId]:
        """Those that have something of the newest."""
        return self._known[self.kept].hosts if self.kept is not None else set()

    @property
    def since(self) -> float | None:
        """When the last rank had that; None: not known."""
        return self._known[self.kept].since if self.kept is not None else None

    def sources(self, at: At) -> tuple[tuple[int, tuple[HostId, ...]], ...]:
        """Who has a snapshot that is kept, by the ranks that took it; empty: each rank has it on its own
        host.
        """
        known, members = self._known[at], self._members
        if known.ranks == len(members) and all(
            host in known.holders.get(rank, ()) for rank, host in members.items()
        ):
            return ()
        return tuple((rank, tuple(sorted(hosts))) for rank, hosts in sorted(known.holders.items()))

    def places(self, at: At) -> Iterable[tuple[int, HostId]]:
        """(rank, host) of all that a snapshot consists of, and of its copies."""
        return ((rank, host) for rank, hosts in self._known[at].holders.items() for host in hosts)

    # ------------------------------------------------------------------ starts

    def begin(self, members: Mapping[int, HostId], slices: Mapping[HostId, SliceName]) -> At | None:
        """These ranks start. Returns what they restore from memory: their own host's, or another's."""
        self._members = dict(members)
        self._peers = peers_of(members, slices, self._copies)
        self._lost.clear()
        self._upto.clear()
        self._taking.clear()
        self._stop_sending()
        # Of what an earlier driver left there may be more: each takes memory that new ones need.
        needed = {*self.kept_all[-2:], self._safe}
        self.kept_all = tuple(at for at in self.kept_all if at in needed)
        self._known = {at: self._known[at] for at in self.kept_all}
        return self.kept

    def adopt(
        self, members: Mapping[int, HostId], slices: Mapping[HostId, SliceName], copies: Iterable[Copy]
    ) -> list[Verdict | Transfer]:
        """The ranks of an earlier driver, and what the hosts have."""
        self.begin(members, slices)
        self.remain(copies)
        if self.kept is None:
            return []
        self._safe = next((at for at in reversed(self.kept_all) if not self._missing(at)), None)
        sent = self._send()
        return [self._settle(self.kept), *sent]

    def remain(self, copies: Iterable[Copy]) -> None:
        """What the hosts have of an earlier driver's ranks, which have ended. All of it may be needed: which
        is restored depends on the hosts that are there when the next ranks start.
        """
        for copy in copies:
            self._snapshot(At(copy.epoch, copy.index), copy.ranks).add(copy.rank, copy.host)
        self.kept_all = tuple(sorted(at for at in self._known if self._is_whole(at)))

    # ------------------------------------------------------------------ what ranks take

    def reported(
        self, rank: int, at: At, taken: Collection[At], now: float, taking: Collection[At] = ()
    ) -> list[Verdict | Transfer]:
        """A rank has come to a report, and has these snapshots of the reports up to it. ``taking``: it will
        say later that it has these.
        """
        host = self._members.get(rank)
        if host is None or host in self._lost:
            return []
        found: list[Verdict | Transfer] = []
        if taking:
            self._taking[rank] = max(taking)
        for copy in sorted(taken):
            if self.kept is None or copy > self.kept:
                self._snapshot(copy, len(self._members)).add(rank, host)
                if self._is_whole(copy):
                    found += self._keep(copy, now)
        self._upto[rank] = max(at, self._upto.get(rank, at))
        return found + self._give_up_missed()

    def returned(self, rank: int) -> list[Verdict | Transfer]:
        """It takes no more of them."""
        if rank not in self._members:
            return []
        self._upto[rank] = _NO_MORE
        return self._give_up_missed()

    def _snapshot(self, at: At, ranks: int) -> KnownSnapshot:
        return self._known.setdefault(at, KnownSnapshot(ranks))

    def _is_whole(self, at: At) -> bool:
        known = self._known[at]
        return sum(bool(hosts) for hosts in known.holders.values()) == known.ranks

    def _keep(self, at: At, now: float | None) -> list[Verdict | Transfer]:
        self._known[at].since = now
        self.kept_all = (*self.kept_all, at)
        sent = self._send()
        return [self._settle(at), *sent]

    def _settle(self, upto: At) -> Verdict:
        """Let go of what isn't needed."""
        needed = {self.kept, self._safe, self._sending}
        gone = [at for at in self.kept_all if at not in needed]
        hosts = set().union(*(self._known[at].hosts for at in gone))
        self.kept_all = tuple(at for at in self.kept_all if at in needed)
        self._known = {
            at: s for at, s in self._known.items() if at in needed or self.kept is None or at > self.kept
        }
        return Verdict(tuple(sorted(self._members)), self.kept_all, upto, tuple(sorted(hosts)))

    def _give_up_missed(self) -> list[Verdict | Transfer]:
        """Of those that a rank has passed without taking one, there will never be all."""
        verdicts: list[Verdict | Transfer] = []
        for at in sorted(at for at in self._known if at not in self.kept_all):
            if any(self._has_missed(rank, at) for rank in self._upto):
                holders = self._known.pop(at).holders
                verdicts.append(Verdict(tuple(sorted(holders)), self.kept_all, at))
        return verdicts

    def _has_missed(self, rank: int, at: At) -> bool:
        passed = self._upto[rank] >= at and rank not in self._known[at].holders
        # One that has returned has finished all that it had begun.
        return passed and (self._taking.get(rank) != at or self._upto[rank] == _NO_MORE)

    # ------------------------------------------------------------------ copies on other hosts

    def _missing(self, at: At) -> set[Transfer]:
        """Copies that should be elsewhere, and aren't."""
        holders = self._known[at].holders
        return {
            Transfer(rank, host, peer, at)
            for rank, host in self._members.items()
            for peer in self._peers[host]
            if peer not in holders.get(rank, ())
        }

    def _send(self) -> list[Transfer]:
        """Copy the newest, if nothing is under way."""
        if self.kept is None or self._sending is not None:
            return []
        self._awaited = self._missing(self.kept)
        if not self._awaited:
            self._safe = self.kept
        elif self._lost.isdisjoint(self._members.values()):
            self._sending = self.kept
            return sorted(self._awaited)
        return []

    def _stop_sending(self) -> None:
        self._sending = None
        self._awaited = set()

    def copied(self, host: HostId, rank: int, at: At, *, failed: bool) -> list[Verdict | Transfer]:
        """A host has a copy of this rank's, or can't have it: then there is no other try."""
        if host in self._lost:
            return []
        if failed and at != self._sending:
            return []
        if at not in self._known:
            return [Verdict((), self.kept_all, at, (host,))]
        if not failed:
            self._known[at].add(rank, host)
            if at not in self.kept_all and self._is_whole(at):
                # Its own host was lost before this was heard.
                self.kept_all = tuple(sorted((*self.kept_all, at)))
        if at != self._sending:
            return []
        self._awaited = {move for move in self._awaited if (move.rank, move.to) != (rank, host)}
        if self._awaited and not failed:
            return []
        if not failed:
            self._safe = at
        self._stop_sending()
        sent = self._send() if self.kept != at else []
        return [self._settle(at), *sent]

    # ------------------------------------------------------------------ losing them

    def host_lost(self, host: HostId) -> None:
        """Its memory is gone, and what it says late of what it had there doesn't count."""
        self._lost.add(host)
        if host in self._members.values():
            self._stop_sending()
        for snapshot in self._known.values():
            snapshot.lose(host)
        self.kept_all = tuple(at for at in self.kept_all if self._is_whole(at))
        if self._safe not in self.kept_all:
            self._safe = None

    def forget(self, at: At) -> None:
        """It can't be restored."""
        self.kept_all = tuple(other for other in self.kept_all if other != at)
        self._known.pop(at, None)
        if self._safe == at:
            self._safe = None
        if self._sending == at:
            self._stop_sending()

    def forget_all(self) -> None:
        for at in self.kept_all:
            self.forget(at)


def peers_of(
    members: Mapping[int, HostId], slices: Mapping[HostId, SliceName], copies: int
) -> dict[HostId, tuple[HostId, ...]]:
    """Who has copies of what is on each host: hosts of the next slices, or the next hosts of the only one."""
    by_slice: dict[SliceName, list[HostId]] = {}
    for host in dict.fromkeys(host for _, host in sorted(members.items())):
        by_slice.setdefault(slices.get(host, host), []).append(host)
    rows: Sequence[list[HostId]] = list(by_slice.values())
    if len(rows) == 1:
        rows = [[host] for host in rows[0]]
    found = {}
    for number, row in enumerate(rows):
        others = [*rows[number + 1 :], *rows[:number]]
        for place, host in enumerate(row):
            found[host] = tuple(other[place % len(other)] for other in others[:copies])
    return found
