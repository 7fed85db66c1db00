"""The order of a source that is read in sequence: shards in a keyed order, then a window that is shuffled.

A ``Lane`` is a virtual shard: some of the shards, one after the other, pass after pass. How many lanes there
are doesn't depend on ranks. Micro-batch ``m`` of every step is drawn from lane ``m % lanes``, so a rank reads
the lanes of its own micro-batches, and with one lane every rank reads everything.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from everstep.data.batch import Cut, micro_batches_in
from everstep.data.errors import DataError, ResumeRefusedError
from everstep.data.order import Permutation
from everstep.data.plan import Batching, MicroPlan, Rank, StepPlan, StreamPlace, dealt
from everstep.data.sequence import Reader, Shards
from everstep.errors import ConfigError

STATE_LIMIT = 80
"""Bytes of a reader's state as JSON: it is in the cursor, which stays small."""


@dataclass(frozen=True)
class Sequencing:
    """What the order of samples is made from, besides the shards."""

    seed: int
    shuffle: bool
    window: int
    lanes: int
    epochs: int | None


class Lane:
    """A virtual shard. Its state is where the current window begins, and how much of that has been drawn, so
    that restoring it reads one window at most.
    """

    def __init__(self, shards: Shards, lane: int, how: Sequencing) -> None:
        self._shards, self._lane, self._how = shards, lane, how
        self._epoch = self._windows = self._ordinal = self._drawn = 0
        self._reader: Reader | None = None
        self._window: list[Any] = []
        self._began: list[Any] = [0, 0, 0, None]

    def draw(self, count: int) -> list[tuple[int, Any]]:
        """The next samples, each with its pass. Fewer only after the last pass."""
        drawn: list[tuple[int, Any]] = []
        while len(drawn) < count:
            if self._drawn == len(self._window) and not self._fill():
                break
            upto = min(len(self._window), self._drawn + count - len(drawn))
            drawn += [(self._began[0], sample) for sample in self._window[self._drawn : upto]]
            self._drawn = upto
        return drawn

    def state(self) -> list[Any]:
        return [*self._began, self._drawn]

    def restore(self, state: list[Any]) -> None:
        self._epoch, self._windows, self._ordinal, reader_state, drawn = state
        self._reader, self._window, self._drawn = None, [], 0
        self._began = state[:4]
        if reader_state is not None:
            with self._naming_the_shard(reader_state):
                self._reader = self._shards.open(self._shard())
                self._reader.restore(reader_state)
        if drawn:
            filled = self._fill()
            if not filled or drawn > len(self._window):
                raise DataError(
                    f"Lane {self._lane} of {self._how.lanes} has fewer samples than when the place in it was "
                    f"saved: {drawn} were seen of a window that has {len(self._window)} now.",
                    "Put the missing data back, or start a new run.",
                )
            self._drawn = drawn

    def _fill(self) -> bool:
        """Read the next window. False: the last pass is over."""
        self._window, self._drawn, empty = [], 0, 0
        while self._how.epochs is None or self._epoch < self._how.epochs:
            self._began = [self._epoch, self._windows, self._ordinal, self._reader_state()]
            read = self._read(self._how.window)
            if read:
                self._window = self._shuffled(read)
                self._windows += 1
                return True
            empty = empty + 1 if self._windows == 0 else 0
            if empty > self._passes_that_may_be_empty():
                raise DataError(
                    f"Lane {self._lane} of {self._how.lanes} has no sample in pass {self._epoch}: its "
                    f"{self._shards_of_lane()} shards are empty, or all is filtered out.",
                    "Check the shards and what filters them.",
                )
            self._epoch, self._windows, self._ordinal = self._epoch + 1, 0, 0
        return False

    def _passes_that_may_be_empty(self) -> int:
        """One lane of several gets other shards in every pass, if they are shuffled."""
        return len(self._shards) if self._how.lanes > 1 and self._how.shuffle else 0

    def _read(self, count: int) -> list[Any]:
        read: list[Any] = []
        while len(read) < count and self._ordinal < self._shards_of_lane():
            with self._naming_the_shard(self._reader_state()):
                if self._reader is None:
                    self._reader = self._shards.open(self._shard())
                try:
                    read.append(next(self._reader))
                except StopIteration:
                    self._reader = None
                    self._ordinal += 1
        return read

    @contextmanager
    def _naming_the_shard(self, state: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            after = "" if state is None else f" after {state!r}"
            raise DataError(
                f"Shard {self._shard()} can't be read{after}: {type(error).__name__}: {error}\n\n"
                f"{''.join(traceback.format_exception(error))}",
                "Mend the shard or what reads it and run again to resume: the place hasn't moved.",
            ) from error

    def _shuffled(self, samples: list[Any]) -> list[Any]:
        if not self._how.shuffle:
            return samples
        parts = (self._how.seed, self._epoch, "window", self._lane, self._windows)
        order = Permutation(len(samples), *parts)
        return [samples[at] for at in order.take(range(len(samples)))]

    def _shards_of_lane(self) -> int:
        return len(range(self._lane, len(self._shards), self._how.lanes))

    def _shard(self) -> int:
        place = self._lane + self._ordinal * self._how.lanes
        if not self._how.shuffle:
            return place
        return Permutation(len(self._shards), self._how.seed, self._epoch, "shards")[place]

    def _reader_state(self) -> Any:
        return None if self._reader is None else self._reader.state()


class SequencedFeed:
    """Lanes, dealt to micro-batches."""

    def __init__(self, shards: Shards, how: Sequencing) -> None:
        self._shards, self._how = shards, how

    def steps(self, batching: Batching) -> int | None:
        return None  # isn't known until all has been read

    def plans(self, start: StreamPlace, rank: Rank, batching: Batching) -> Iterator[StepPlan]:
        lanes = self._opened(start, self._read_by(rank, batching))
        place = start
        while drawn := self._drawn(lanes, batching):
            samples = batching.global_batch if self._how.lanes > 1 else len(drawn)
            if samples < batching.global_batch and batching.drop_last:
                return
            end = StreamPlace(
                place.step + 1,
                place.sample + samples,
                {number: lane.state() for number, lane in lanes.items()},
            )
            cuts = dealt(samples, rank, batching)
            micros = [
                self._micro(cut, place.sample, drawn, rank.world_size / samples, at == len(cuts))
                for at, cut in enumerate(cuts, 1)
            ]
            yield StepPlan(place.step, micros[0].epochs[0], samples, micros, end)
            place = end

    def _read_by(self, rank: Rank, batching: Batching) -> set[int]:
        cuts = dealt(batching.global_batch, rank, batching)
        micros = {offset // batching.micro_batch for cut in cuts for offset in cut.offsets}
        return {micro % self._how.lanes for micro in micros}

    def _opened(self, start: StreamPlace, numbers: set[int]) -> dict[int, Lane]:
        missing = sorted(numbers - set(start.lanes)) if start.step else []
        if missing:
            raise ResumeRefusedError(
                f"The cursor lacks lanes {', '.join(map(str, missing))}, which this rank reads now.",
                "With lanes=… each rank's state_dict() has the lanes that it read. Give load_state_dict a "
                "list of the states of all ranks, saved at the same step.",
                "Stream.lanes",
            )
        lanes = {number: Lane(self._shards, number, self._how) for number in sorted(numbers)}
        for number, lane in lanes.items():
            if number in start.lanes:
                lane.restore(start.lanes[number])
        return lanes

    def _drawn(self, lanes: dict[int, Lane], batching: Batching) -> dict[int, tuple[int, Any]]:
        """The next step's samples of these lanes, by their place in it."""
        drawn: dict[int, tuple[int, Any]] = {}
        micros = micro_batches_in(batching.global_batch, batching.micro_batch)
        for number, lane in lanes.items():
            offsets = [
                offset
                for micro in range(number, micros, self._how.lanes)
                for offset in range(
                    micro * batching.micro_batch,
                    min((micro + 1) * batching.micro_batch, batching.global_batch),
                )
            ]
            drawn.update(zip(offsets, lane.draw(len(offsets)), strict=False))
        return drawn

    def _micro(
        self, cut: Cut, first: int, drawn: dict[int, tuple[int, Any]], weight: float, last: bool
    ) -> MicroPlan:
        return MicroPlan(
            ids=[first + offset for offset in cut.offsets],
            epochs=[drawn[offset][0] for offset in cut.offsets],
            real=cut.real,
            weight=weight,
            key=self._how.seed,
            last=last,
            samples=[drawn[offset][1] for offset in cut.offsets],
        )


def refuse_large_states(lanes: dict[int, Any]) -> None:
    for number, state in lanes.items():
        try:
            size = len(json.dumps(state[3]))
        except TypeError as error:
            raise ConfigError(
                f"The state of a reader of lane {number} can't be saved: {error}.",
                "Let state() return a number, a text, or a list of such.",
                "Reader.state",
            ) from error
        if size > STATE_LIMIT:
            raise ConfigError(
                f"The state of a reader of lane {number} has {size} bytes, expected {STATE_LIMIT} or fewer.",
                "Let state() say where the next sample begins (an offset), not what has been read.",
                "Reader.state",
            )
