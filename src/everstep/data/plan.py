"""What a step will be, before any of its samples is loaded; and the place before and after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from everstep.data.batch import deal
from everstep.data.order import InOrder, Permutation, folded


@dataclass(frozen=True)
class Place:
    """How far a stream has come: steps and samples that are done; where sources are read in sequence, the
    state of each lane that this rank reads.
    """

    step: int = 0
    sample: int = 0
    lanes: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rank:
    """Whose share of each step is planned."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class Batching:
    global_batch: int
    micro_batch: int
    drop_last: bool = False
    even: bool = False


@dataclass(frozen=True)
class MicroPlan:
    """A micro-batch: its samples' numbers, of which those after the first ``real`` are padding."""

    ids: Sequence[int]
    epochs: Sequence[int]
    real: int
    weight: float
    """Of each real sample in the average over ranks."""
    key: int
    """The stream's seed."""
    last: bool = False
    samples: Sequence[Any] | None = None
    """Where they have been read already."""

    @property
    def seed(self) -> int:
        return folded(self.key, self.epochs[0], self.ids[0])


@dataclass(frozen=True)
class StepPlan:
    number: int
    epoch: int
    samples: int
    micros: Sequence[MicroPlan]
    end: Place


class Feed(Protocol):
    """A source in its order."""

    def plans(self, start: Place, rank: Rank, batching: Batching) -> Iterator[StepPlan]:
        """A rank's share of each step from a place on."""
        ...


class IndexedFeed:
    """Samples that are asked for by number. Where a stream has come is the number of samples that are done,
    and a step may have the last samples of a pass and the first of the next.
    """

    def __init__(self, length: int, seed: int, shuffle: bool, epochs: int | None) -> None:
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.total = None if epochs is None else epochs * length
        self._order = lru_cache(maxsize=2)(self._order_of)

    def steps(self, batching: Batching) -> int | None:
        """How many steps the whole stream has."""
        if self.total is None:
            return None
        whole, rest = divmod(self.total, batching.global_batch)
        return whole + (1 if rest and not batching.drop_last else 0)

    def plans(self, start: Place, rank: Rank, batching: Batching) -> Iterator[StepPlan]:
        place = start
        while samples := self._samples_at(place.sample, batching):
            end = Place(place.step + 1, place.sample + samples)
            micros = self._micros(place.sample, samples, rank, batching)
            yield StepPlan(place.step, place.sample // self.length, samples, micros, end)
            place = end

    def _samples_at(self, first: int, batching: Batching) -> int:
        left = batching.global_batch if self.total is None else self.total - first
        if left < batching.global_batch and batching.drop_last:
            return 0
        return max(0, min(left, batching.global_batch))

    def _micros(self, first: int, samples: int, rank: Rank, batching: Batching) -> list[MicroPlan]:
        cuts = deal(
            samples, batching.global_batch, batching.micro_batch, rank.rank, rank.world_size, batching.even
        )
        places = [first + offset for cut in cuts for offset in cut.offsets]
        ids, epochs = self._ids(places), [place // self.length for place in places]
        micros, at = [], 0
        for number, cut in enumerate(cuts, 1):
            end = at + len(cut.offsets)
            weight = rank.world_size / samples
            last = number == len(cuts)
            micros.append(MicroPlan(ids[at:end], epochs[at:end], cut.real, weight, self.seed, last))
            at = end
        return micros

    def _ids(self, places: list[int]) -> list[int]:
        epoch, last = min(places) // self.length, max(places) // self.length
        if epoch == last:  # all but always: one call for all of them
            return self._order(epoch).take([place - epoch * self.length for place in places])
        return [self._order(place // self.length).take([place % self.length])[0] for place in places]

    def _order_of(self, epoch: int) -> Permutation | InOrder:
        return Permutation(self.length, self.seed, epoch) if self.shuffle else InOrder(self.length)
