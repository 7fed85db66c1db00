"""Sources that are read in sequence: shards, each with a reader that has ``state()`` and ``restore()``.

Filtering, mapping and packing are readers around another reader. The order in which shards are read, and
which micro-batch gets what, is in ``lanes``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from everstep.errors import ConfigError


class Reader(Protocol):
    """One shard, from its beginning or from a state."""

    def __next__(self) -> Any: ...

    def state(self) -> Any:
        """Where the next sample begins: a number, a text, or a list of such."""
        ...

    def restore(self, state: Any) -> None: ...


class Shards(ABC):
    """Pieces of a data set, each of which is read from beginning to end."""

    @abstractmethod
    def __len__(self) -> int:
        """How many shards there are."""

    @abstractmethod
    def open(self, shard: int) -> Reader:
        """Read a shard from its beginning."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that differs where the data does."""

    def map(self, change: Callable[[Any], Any]) -> Shards:
        """Each sample changed."""
        return _Wrapped(self, lambda reader: _Mapped(reader, change), "map")

    def filter(self, keep: Callable[[Any], bool]) -> Shards:
        """Only some of the samples."""
        return _Wrapped(self, lambda reader: _Filtered(reader, keep), "filter")

    def pack(self, length: int) -> Shards:
        """Samples that are sequences (of tokens) joined, and cut into lists of exactly ``length``. What is
        left at the end of a shard, less than one, is dropped.
        """
        return _Wrapped(self, lambda reader: _Packed(reader, length), f"pack {length}")


class _Wrapped(Shards):
    def __init__(self, shards: Shards, around: Callable[[Reader], Reader], what: str) -> None:
        self._shards, self._around, self._what = shards, around, what

    def __len__(self) -> int:
        return len(self._shards)

    def open(self, shard: int) -> Reader:
        return self._around(self._shards.open(shard))

    def fingerprint(self) -> str:
        return f"{self._shards.fingerprint()} {self._what}"


def _called(function: Callable[[Any], Any], sample: Any) -> Any:
    """From a reader, ``StopIteration`` is the end of the shard; from a function it is a mistake."""
    try:
        return function(sample)
    except StopIteration as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise RuntimeError(f"{name} raised StopIteration") from error


class _Mapped:
    def __init__(self, reader: Reader, change: Callable[[Any], Any]) -> None:
        self._reader, self._change = reader, change
        self.state, self.restore = reader.state, reader.restore

    def __next__(self) -> Any:
        return _called(self._change, next(self._reader))


class _Filtered:
    def __init__(self, reader: Reader, keep: Callable[[Any], bool]) -> None:
        self._reader, self._keep = reader, keep
        self.state, self.restore = reader.state, reader.restore

    def __next__(self) -> Any:
        while not _called(self._keep, sample := next(self._reader)):
            pass
        return sample


class _Packed:
    """Its state: that of the reader before the sequence that the next pack begins in, and how much of that
    sequence has been used.
    """

    def __init__(self, reader: Reader, length: int) -> None:
        if length < 1:
            raise ConfigError(f"pack({length}): expected 1 or more.", "Give the length of a sample.", "pack")
        self._reader, self._length = reader, length
        self._tokens: list[Any] = []
        self._from, self._used = reader.state(), 0

    def __next__(self) -> list[Any]:
        packed: list[Any] = []
        while len(packed) < self._length:
            if self._used == len(self._tokens):
                self._from, self._used = self._reader.state(), 0
                self._tokens = list(next(self._reader))
            part = self._tokens[self._used : self._used + self._length - len(packed)]
            packed += part
            self._used += len(part)
        return packed

    def state(self) -> Any:
        return [self._from, self._used]

    def restore(self, state: Any) -> None:
        self._from, self._used = state
        self._reader.restore(self._from)
        self._tokens = list(next(self._reader)) if self._used else []
