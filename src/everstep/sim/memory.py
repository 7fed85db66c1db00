"""Snapshots in the memory of simulated hosts: each rank has a few slots there, which outlive its process, and
copies on other hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from everstep.protocol.peer_messages import PeerAddress
from everstep.saved.snapshots import At, Copy

SLOTS = 3


class SimCopy(NamedTuple):
    """What is in a slot: whole, or it isn't there."""

    at: At
    step: int
    ranks: int
    """How many it was divided among."""


class SimMemory:
    """Of one host."""

    def __init__(self) -> None:
        self._slots: dict[int, list[SimCopy | None]] = {}
        self._copies: dict[tuple[int, At], SimCopy] = {}
        """Of ranks that aren't here."""
        self.sources: dict[int, list[PeerAddress]] = {}
        """Which hosts have what workers here restore, by rank."""

    def begin(self, rank: int, kept: Collection[At]) -> int | None:
        """A worker writes over a slot that it may. Returns which; it holds nothing until it is finished.
        None: all are needed.
        """
        slots = self._slots.setdefault(rank, [None] * SLOTS)
        number = next((i for i, held in enumerate(slots) if held is None or held.at not in kept), None)
        if number is not None:
            slots[number] = None
        return number

    def finish(self, rank: int, number: int, copy: SimCopy) -> None:
        if rank in self._slots:
            self._slots[rank][number] = copy

    def add_copy(self, rank: int, copy: SimCopy) -> None:
        self._copies[rank, copy.at] = copy

    def retain(self, ranks: Collection[int], kept: Collection[At]) -> None:
        """These ranks train here from now on. Of others, only these snapshots are needed."""
        for rank in [rank for rank in self._slots if rank not in ranks]:
            for held in self._slots.pop(rank):
                if held is not None:
                    self.add_copy(rank, held)
        self.keep_copies(kept)

    def keep_copies(self, kept: Collection[At]) -> None:
        self._copies = {key: held for key, held in self._copies.items() if key[1] in kept}

    def clear(self) -> None:
        self._slots, self._copies = {}, {}

    def find(self, rank: int, at: At) -> SimCopy | None:
        for held in self._slots.get(rank, ()):
            if held is not None and held.at == at:
                return held
        return self._copies.get((rank, at))

    def held(self) -> Iterator[tuple[int, SimCopy]]:
        """By rank."""
        for rank, slots in self._slots.items():
            yield from ((rank, held) for held in slots if held is not None)
        yield from ((rank, held) for (rank, _), held in self._copies.items())

    def copies(self) -> list[Copy]:
        """As an inventory has them."""
        return [Copy(rank, "", *held.at, held.ranks) for rank, held in self.held()]
