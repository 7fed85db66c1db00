"""The ranks' k-th reports, merged into checkpoints that can be committed.

A report is not a barrier: ranks come to k at different times. Checkpoint k of a group is complete when
every rank of the group has either brought its part of k, or passed k without one, or returned. Metrics
don't pass through here.
"""

from __future__ import annotations

from collections.abc import Set

import msgspec


class Part(msgspec.Struct, frozen=True):
    """One rank's share of a checkpoint, already in storage."""

    index: int
    """Index of the report among those of this rank in this epoch, from 1."""
    folder: str
    """The checkpoint's folder, relative to the run's."""
    record: bytes = b""
    """The part record (files, sizes, digests), opaque here."""
    held: bool = False
    """The rank makes no further step before the commit: it knew that workers may change over at this one."""


class CompleteCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint of which every part is there."""

    index: int
    folder: str
    parts: tuple[tuple[int, Part], ...]
    """(rank, part), by rank."""

    @property
    def held(self) -> bool:
        """Whether the workers can change over at it without losing a step."""
        return all(part.held for _, part in self.parts)


class Settled(msgspec.Struct, frozen=True):
    """Checkpoints to which nobody will add anything any more."""

    ready: tuple[CompleteCheckpoint, ...] = ()
    garbage: tuple[str, ...] = ()
    """Folders of those that lack a part for good."""


_NOTHING = Settled()


class ReportBook:
    """Reports of one incarnation of one group: what each rank brought, and what is still missing."""

    def __init__(self, ranks: frozenset[int], after: int = 0) -> None:
        """``after``: what was reported up to here has been dealt with, by an earlier driver."""
        self._ranks = ranks
        self._after = after
        self._upto = dict.fromkeys(ranks, 0)
        self._returned: set[int] = set()
        self._owed: dict[int, set[int]] = {rank: set() for rank in ranks}
        """Indices whose part a rank has announced and not brought yet."""
        self._early: dict[int, set[int]] = {rank: set() for rank in ranks}
        """Indices of which it is known what became of a rank's part before the rank has reported them."""
        self._pending: dict[int, dict[int, Part]] = {}
        self._spoilt: set[int] = set()
        self._in_order = tuple(sorted(ranks))
        self._settled_first: dict[int, int] = {}
        """How many of the ranks in order are known to be settled, by index: they stay so."""

    @property
    def furthest(self) -> int:
        """The highest report index of any rank."""
        return max(self._upto.values(), default=0)

    @property
    def open_folders(self) -> dict[int, str]:
        """Checkpoints that have a part and can't be committed yet, by index."""
        return {k: _folder(parts) for k, parts in sorted(self._pending.items())}

    @property
    def waiting(self) -> dict[int, str]:
        """Checkpoints that were reported and are neither complete nor given up, by index; without a name
        where no part is in storage yet.
        """
        found = set().union(*self._owed.values(), self._pending.keys())
        if not found:
            return {}
        folders = self.open_folders
        return {k: folders.get(k, "") for k in sorted(found)}

    def has_all(self, index: int) -> bool:
        """Whether every rank has made report ``index``, or returned."""
        return all(upto >= index or rank in self._returned for rank, upto in self._upto.items())

    def is_uploading(self, upto: int) -> bool:
        """Whether a part of one of the reports up to this one is on its way to storage."""
        return any(index <= upto for owed in self._owed.values() for index in owed)

    def behind(self, index: int) -> list[int]:
        """The ranks that have not made report ``index``, and have not returned."""
        return sorted(rank for rank in self._ranks - self._returned if self._upto[rank] < index)

    def behind_by(self, rank: int, others: Set[int]) -> int:
        """How many reports fewer this rank has made than the one of these others that has made most."""
        return max((self._upto[other] - self._upto[rank] for other in others), default=0)

    def uploads(self, index: int) -> list[int]:
        """The ranks whose part of checkpoint ``index`` is on its way to storage."""
        return sorted(rank for rank, owed in self._owed.items() if index in owed)

    def awaited(self, rank: int) -> set[int]:
        """Indices of this rank's checkpoints that are neither complete nor given up. Also those that can't be
        complete, while others may add to them: a later driver must know why not, or it would think that the
        rank had nothing to add.
        """
        return self._owed[rank] | {k for k, parts in self._pending.items() if rank in parts} | self._spoilt

    def lacking_uploads(self) -> frozenset[int]:
        """Checkpoints that every rank has reported, and that lack nothing but uploads."""
        awaited = frozenset().union(*self._owed.values()) - self._spoilt
        return frozenset(
            index
            for index in awaited
            if all(self._settled(rank, index) or index in self._owed[rank] for rank in self._ranks)
        )

    def uploading(self) -> frozenset[int]:
        """Ranks whose upload alone stands between a checkpoint and its commit: it needs no process."""
        whole = self.lacking_uploads()
        return frozenset(rank for rank, owed in self._owed.items() if not owed.isdisjoint(whole))

    def reported(self, rank: int, upto: int, owed: tuple[int, ...], parts: tuple[Part, ...]) -> Settled:
        """Rank has reported up to ``upto``; ``parts`` are in storage, and those in ``owed`` on their way
        there.
        """
        assert rank in self._ranks, f"rank {rank} is not in this group"
        before = max(self._upto[rank], self._after)
        self._upto[rank] = max(self._upto[rank], upto)
        brought = [part for part in parts if part.index > before or part.index in self._owed[rank]]
        # What was brought before, or is reported twice, adds nothing. An agent may have uploaded a part
        # before its rank announced it.
        self._owed[rank].update(k for k in owed if k > before and k not in self._early[rank])
        self._early[rank] = {k for k in self._early[rank] if k > self._upto[rank]}
        for part in brought:
            self._owed[rank].discard(part.index)
            if part.index > self._upto[rank]:
                self._early[rank].add(part.index)
            self._pending.setdefault(part.index, {})[rank] = part
        return self._collect()

    def upload_failed(self, rank: int, index: int) -> Settled:
        """A part will never come: its checkpoint can't be committed."""
        if index <= self._after:
            return Settled()
        if index in self._owed[rank] or index > self._upto[rank]:
            self._owed[rank].discard(index)
            self._spoilt.add(index)
        if index > self._upto[rank]:
            self._early[rank].add(index)
        return self._collect()

    def returned(self, rank: int) -> Settled:
        """The rank's function returned: it has nothing to add but what it owes."""
        self._returned.add(rank)
        return self._collect()

    def host_lost(self, ranks: frozenset[int]) -> Settled:
        """What these ranks owe will never come."""
        for rank in ranks & self._ranks:
            self._spoilt |= self._owed[rank]
            self._owed[rank].clear()
        return self._collect()

    def _settled(self, rank: int, index: int) -> bool:
        if index in self._owed[rank]:
            return False
        return self._upto[rank] >= index or rank in self._returned

    def _is_settled(self, index: int) -> bool:
        """No rank will add to this checkpoint any more. A rank that is settled isn't checked again."""
        first = self._settled_first.get(index, 0)
        while first < len(self._in_order) and self._settled(self._in_order[first], index):
            first += 1
        self._settled_first[index] = first
        return first == len(self._in_order)

    def _collect(self) -> Settled:
        if not self._pending and not self._spoilt:
            return _NOTHING
        ready, garbage = [], []
        for index in sorted(self._pending.keys() | self._spoilt):
            if not self._is_settled(index):
                continue
            parts = self._pending.pop(index, {})
            del self._settled_first[index]
            if index in self._spoilt:
                self._spoilt.discard(index)
                garbage += [_folder(parts)] if parts else []
            else:
                ready.append(
                    CompleteCheckpoint(
                        index, _folder(parts), tuple(sorted(parts.items(), key=lambda item: item[0]))
                    )
                )
        return Settled(tuple(ready), tuple(garbage))


def _folder(parts: dict[int, Part]) -> str:
    return next(iter(parts.values())).folder
