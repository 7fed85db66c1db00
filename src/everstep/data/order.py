"""Which sample is the i-th: arithmetic on (seed, pass, i), and nothing else.

``Permutation`` is a keyed permutation of ``range(length)`` that is computed, not stored: a Feistel network
over pairs ``(high, low)`` whose product is just above the length, and which walks on while it is outside. It
takes the same time and memory for ten samples as for 10⁹. NumPy is used for more than a few indices at once
where it is installed; without it the same numbers come out, more slowly.

``folded`` makes seeds from the same parts, for random changes of a sample.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MAX_LENGTH = 1 << 62
"""Sums of two coordinates stay inside 64 bits."""

_VERSION = 1
"""Part of every key. Another number is another order, which breaks the resume of every run."""

_ROUNDS, _SMALL_ROUNDS, _SMALL = 10, 24, 1 << 16
"""Small permutations need more rounds until every order is equally likely."""

_MASK = (1 << 64) - 1
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB

_FEW = 24
"""Up to this number of indices, plain Python is quicker than NumPy."""


def keys_of(count: int, *parts: object) -> tuple[int, ...]:
    """``count`` numbers of 64 bits that look random, and are the same wherever the parts are the same."""
    text = "everstep.data/" + "/".join(map(str, (_VERSION, *parts)))
    digest = hashlib.shake_128(text.encode()).digest(8 * count)
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, 8 * count, 8))


def folded(seed: int, epoch: int, number: int) -> int:
    """The seed of sample ``number`` in a pass: from 0 to 2⁶³ - 1, which every framework takes."""
    return _mixed(_mixed(number + _pass_key(seed, epoch)) + 1) >> 1


@lru_cache(maxsize=64)
def _pass_key(seed: int, epoch: int) -> int:
    return keys_of(1, "sample", seed, epoch)[0]


class Permutation:
    """The order of ``length`` samples (at least one), keyed by parts that have a text (a seed, a pass)."""

    def __init__(self, length: int, *parts: object) -> None:
        self.length = length
        # An even number of rows: a shift among an odd number is an even permutation, and a product of even
        # ones never makes half of the orders.
        rows = math.isqrt(length - 1) + 1
        self._rows = rows + rows % 2
        self._columns = -(-length // self._rows)
        self._keys = keys_of(_SMALL_ROUNDS if length < _SMALL else _ROUNDS, *parts, length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(f"{index} is not in range({self.length})")
        place = self._once(index)
        while place >= self.length:
            place = self._once(place)
        return place

    def take(self, indices: Sequence[int]) -> list[int]:
        """The samples at these indices, which must be in range."""
        numpy = numpy_here() if len(indices) > _FEW else None
        if numpy is None:
            return [self[index] for index in indices]
        places = self._all_once(numpy, numpy.asarray(indices, dtype=numpy.uint64))
        outside = numpy.flatnonzero(places >= self.length)
        while outside.size:
            places[outside] = self._all_once(numpy, places[outside])
            outside = outside[places[outside] >= self.length]
        return places.tolist()  # type: ignore[no-any-return]

    def _once(self, index: int) -> int:
        high, low = divmod(index, self._columns)
        for at in range(0, len(self._keys), 2):
            high = (high + _mixed(low + self._keys[at])) % self._rows
            low = (low + _mixed(high + self._keys[at + 1])) % self._columns
        return high * self._columns + low

    def _all_once(self, numpy: Any, indices: Any) -> Any:
        rows, columns = numpy.uint64(self._rows), numpy.uint64(self._columns)
        high, low = numpy.divmod(indices, columns)
        for at in range(0, len(self._keys), 2):
            _shift(numpy, high, _all_mixed(numpy, low + numpy.uint64(self._keys[at])), rows)
            _shift(numpy, low, _all_mixed(numpy, high + numpy.uint64(self._keys[at + 1])), columns)
        return high * columns + low


def _shift(numpy: Any, places: Any, by: Any, among: Any) -> None:
    """``places = (places + by) % among``, in place. Dividing by one number and subtracting is quicker than
    ``%``; and of a sum that is below twice ``among``, the smaller of it and what wraps around is the rest.
    """
    by -= by // among * among
    places += by
    numpy.minimum(places, places - among, out=places)


class InOrder:
    """The order of a stream that isn't shuffled."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, indices: Sequence[int]) -> list[int]:
        return list(indices)


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64: every bit of the value changes about half of the bits of the result."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST_FACTOR) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND_FACTOR) & _MASK
    return value ^ (value >> 31)


def _all_mixed(numpy: Any, values: Any) -> Any:
    """The same for an array, which is written over."""
    values ^= values >> numpy.uint64(30)
    values *= numpy.uint64(_FIRST_FACTOR)
    values ^= values >> numpy.uint64(27)
    values *= numpy.uint64(_SECOND_FACTOR)
    values ^= values >> numpy.uint64(31)
    return values


@lru_cache(maxsize=1)
def numpy_here() -> Any:
    """NumPy, where it is installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
