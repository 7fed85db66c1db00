"""What a step will be, before any of its samples is loaded; and the place before and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from everstep.data.batch import Cut, deal
from everstep.data.order import InOrder, Permutation, folded

_TOGETHER = 2048
"""Samples whose order is computed at once."""


@dataclass(frozen=True)
class StreamPlace:
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


def as_one(micros: Sequence[MicroPlan]) -> MicroPlan:
    """A rank's micro-batches of a step as a single one, without padding unless that is all there is."""
    real = [micro for micro in micros if micro.real] or [micros[0]]
    first = real[0]

    def parts(of: Callable[[MicroPlan], Sequence[Any]]) -> list[Any]:
        return [part for micro in real for part in of(micro)[: micro.real or None]]

    samples = None if first.samples is None else parts(lambda micro: micro.samples or ())
    return MicroPlan(
        parts(lambda micro: micro.ids),
        parts(lambda micro: micro.epochs),
        sum(micro.real for micro in real),
        first.weight,
        first.key,
        last=True,
        samples=samples,
    )


@dataclass(frozen=True)
class StepPlan:
    number: int
    epoch: int
    samples: int
    micros: Sequence[MicroPlan]
    end: StreamPlace


class IndexedFeed:
    """Samples that are loaded by number. The place in the stream is the number of samples that are done. A
    step may have the last samples of a pass and the first of the next.
    """

    def __init__(self, length: int, seed: int, shuffle: bool, epochs: int | None) -> None:
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.total = None if epochs is None else epochs * length

    def steps(self, batching: Batching) -> int | None:
        """How many steps the whole stream has."""
        if self.total is None:
            return None
        whole, rest = divmod(self.total, batching.global_batch)
        return whole + (1 if rest and not batching.drop_last else 0)

    def plans(self, start: StreamPlace, rank: Rank, batching: Batching) -> Iterator[StepPlan]:
        """Several steps are planned at a time, a few first and then more: the order of many samples takes
        hardly longer than that of one.
        """
        place, together = start, 1
        while True:
            steps = list(islice(self._sizes(place, batching), together))
            if not steps:
                return
            yield from self._planned(steps, rank, batching)
            place = steps[-1][1]
            share = 1 + batching.global_batch // rank.world_size
            together = min(2 * together, max(1, _TOGETHER // share))

    def _sizes(self, place: StreamPlace, batching: Batching) -> Iterator[tuple[StreamPlace, StreamPlace]]:
        """The place before and after each step."""
        while samples := self._samples_at(place.sample, batching):
            end = StreamPlace(place.step + 1, place.sample + samples)
            yield place, end
            place = end

    def _samples_at(self, first: int, batching: Batching) -> int:
        left = batching.global_batch if self.total is None else self.total - first
        if left < batching.global_batch and batching.drop_last:
            return 0
        return max(0, min(left, batching.global_batch))

    def _planned(
        self, steps: list[tuple[StreamPlace, StreamPlace]], rank: Rank, batching: Batching
    ) -> Iterator[StepPlan]:
        shares = [dealt(end.sample - place.sample, rank, batching) for place, end in steps]
        places = [
            place.sample + offset
            for (place, _), cuts in zip(steps, shares, strict=True)
            for cut in cuts
            for offset in cut.offsets
        ]
        first, last = (place // self.length for place in (steps[0][0].sample, steps[-1][1].sample - 1))
        if first == last:
            epochs = [first] * len(places)
            ids = self._order(first).take([place - first * self.length for place in places])
        else:
            epochs = [place // self.length for place in places]
            ids = self._ids(places, epochs)
        at = 0
        for (place, end), cuts in zip(steps, shares, strict=True):
            samples, micros = end.sample - place.sample, []
            for number, cut in enumerate(cuts, 1):
                part = slice(at, at := at + len(cut.offsets))
                weight, last = rank.world_size / samples, number == len(cuts)
                micros.append(MicroPlan(ids[part], epochs[part], cut.real, weight, self.seed, last))
            yield StepPlan(place.step, place.sample // self.length, samples, micros, end)

    def _ids(self, places: list[int], epochs: list[int]) -> list[int]:
        """Of several passes."""
        ids = [0] * len(places)
        for epoch in sorted(set(epochs)):
            mine = [at for at, of in enumerate(epochs) if of == epoch]
            taken = self._order(epoch).take([places[at] - epoch * self.length for at in mine])
            for at, number in zip(mine, taken, strict=True):
                ids[at] = number
        return ids

    def _order(self, epoch: int) -> Permutation | InOrder:
        return order_of(self.length, self.seed, epoch) if self.shuffle else InOrder(self.length)


@lru_cache(maxsize=8)
def order_of(length: int, seed: int, epoch: int) -> Permutation:
    """The order of one pass."""
    return Permutation(length, seed, epoch)


@lru_cache(maxsize=8)
def dealt(samples: int, rank: Rank, batching: Batching) -> list[Cut]:
    """A rank's share of a step. All but the last step have the same."""
    return deal(
        samples, batching.global_batch, batching.micro_batch, rank.rank, rank.world_size, batching.even
    )
