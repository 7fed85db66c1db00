"""Memory that outlives the process that fills it, for as long as another one holds a descriptor of it.

A slot holds one snapshot of one rank: its files, and notes that describe them. The notes have a mark that the
snapshot is whole, which is written last and cleared first: a process that is killed while it writes leaves a
slot without the mark.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from everstep.process import kernel
from everstep.saved.snapshots import At

_LABEL = struct.Struct("<8sQQQQQQ32s")
_NUMBERS = struct.Struct("<QQQQQ")
_MAGIC = b"everstp4"
_WHOLE = 1


class Segment:
    """An anonymous file in memory. The descriptor is its own, and is closed with it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._before_unmapping: list[Callable[[], None]] = []

    @classmethod
    def create(cls, name: str, size: int = 0) -> Segment:
        segment = cls(kernel.anonymous_file(f"everstep-{name}"))
        try:
            segment.resize(size)
        except BaseException:
            segment.close()
            raise
        return segment

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    @property
    def used(self) -> int:
        """How much of it has been written to."""
        return min(self.size, os.fstat(self.fd).st_blocks * 512)

    @property
    def path(self) -> Path:
        """Where this process can open it as a file."""
        return Path(f"/dev/fd/{self.fd}")

    def resize(self, size: int) -> None:
        self.unmap()
        os.ftruncate(self.fd, size)

    def map(self) -> mmap.mmap:
        """All of it, as large as it is now: another process may have resized it."""
        if self._map is not None and len(self._map) != self.size:
            self.unmap()
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size)
        return self._map

    def before_unmapping(self, release: Callable[[], None]) -> None:
        """Have this called before the mapping goes: for a device with which it is registered."""
        self._before_unmapping.append(release)

    def unmap(self) -> None:
        while self._before_unmapping:
            self._before_unmapping.pop()()
        # Whoever still looks at the old mapping keeps it; it goes with the last of them.
        self._map = None

    def close(self) -> None:
        self.unmap()
        os.close(self.fd)


class Label(msgspec.Struct, frozen=True):
    """Which snapshot a slot holds."""

    epoch: int
    index: int
    """The report that it was taken in."""
    ranks: int
    """How many ranks took one together."""
    notes: int
    """How many bytes of notes there are."""
    contents: int
    """How many bytes say what is in its files."""
    digest: bytes
    """Of both, and of the numbers above."""

    @property
    def at(self) -> At:
        return At(self.epoch, self.index)

    def is_of(self, body: bytes) -> bool:
        """Whether this is what was put there, with these notes and contents."""
        return self.digest == _digest((self.epoch, self.index, self.ranks, self.notes, self.contents), body)


def _digest(numbers: Sequence[int], body: bytes) -> bytes:
    return hashlib.sha256(_NUMBERS.pack(*numbers) + body).digest()


class FileContent(msgspec.Struct, frozen=True, array_like=True):
    """Two files of equal content are the same, in any slot and on any host."""

    size: int
    digest: bytes


_contents = msgspec.msgpack.Decoder(dict[str, FileContent])


def _label(memory: mmap.mmap | bytes) -> Label | None:
    magic, state, epoch, index, ranks, notes, contents, digest = _LABEL.unpack_from(memory)
    if (magic, state) != (_MAGIC, _WHOLE):
        return None
    return Label(epoch, index, ranks, notes, contents, digest)


class SlotRecord:
    """All that says which snapshot a slot holds, and what that consists of."""

    def __init__(self, data: bytes, label: Label) -> None:
        self.data = data
        self.label = label

    @classmethod
    def of(cls, data: bytes) -> SlotRecord | None:
        """None: it is of no snapshot, or of one that was being written over."""
        label = _label(data)
        return cls(data, label) if label is not None else None

    @property
    def notes(self) -> bytes:
        return self.data[_LABEL.size : _LABEL.size + self.label.notes]

    @property
    def contents(self) -> dict[str, FileContent]:
        """What is in its files, by name: also in those that aren't here. Nothing is known of them if this is
        damaged.
        """
        return _contents.decode(self.data[_LABEL.size + self.label.notes :]) if self.is_sound else {}

    @property
    def is_sound(self) -> bool:
        """Whether it is what was put there."""
        return self.label.is_of(self.data[_LABEL.size :])


class Slot:
    """Room for one snapshot of a rank: notes, and files by name. Of a snapshot that is of another host, some
    files may not be here.
    """

    def __init__(self, notes: Segment, files: Mapping[str, Segment]) -> None:
        self._notes = notes
        self.files = dict(files)

    @classmethod
    def create(cls, name: str, sizes: Mapping[str, int]) -> Slot:
        slot = cls(Segment.create(f"{name}-notes", _LABEL.size), {})
        try:
            for file, size in sizes.items():
                slot.files[file] = Segment.create(f"{name}-{file}", size)
        except BaseException:
            slot.close()
            raise
        return slot

    @property
    def fds(self) -> list[int]:
        """Of the notes first, then of the files in the order of their names."""
        return [self._notes.fd, *(self.files[name].fd for name in sorted(self.files))]

    @classmethod
    def copied(cls, name: str, record: SlotRecord) -> Slot:
        """What says which snapshot another slot holds, without its files."""
        notes = Segment.create(f"{name}-notes", len(record.data))
        notes.map()[:] = record.data
        return cls(notes, {})

    @classmethod
    def of(cls, names: list[str], fds: list[int]) -> Slot:
        return cls(Segment(fds[0]), dict(zip(sorted(names), map(Segment, fds[1:]), strict=True)))

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.files.values())

    @property
    def used(self) -> int:
        return sum(segment.used for segment in self.files.values())

    @property
    def label(self) -> Label | None:
        """The snapshot that is here; None: none is, or not all of one."""
        return _label(self._notes.map()) if self._notes.size >= _LABEL.size else None

    @property
    def record(self) -> SlotRecord | None:
        """What says which snapshot is here; None: none is, or it is being written over."""
        label = self.label
        if label is None:
            return None
        record = SlotRecord.of(self._notes.map()[: _LABEL.size + label.notes + label.contents])
        return record if record is not None and record.label == label == self.label else None

    @property
    def notes(self) -> bytes:
        record = self.record
        assert record is not None, "a slot without a snapshot has no notes"
        return record.notes

    def with_files(self, files: Mapping[str, Segment]) -> Slot:
        """The same, with these files: they may be another slot's."""
        return Slot(self._notes, files)

    def clear(self) -> None:
        """What is here is no snapshot any more: it is about to be written over."""
        _LABEL.pack_into(self._notes.map(), 0, _MAGIC, 0, 0, 0, 0, 0, 0, b"")

    def finish(self, at: At, ranks: int, notes: bytes, digests: Mapping[str, bytes]) -> None:
        """The files are written, and have these digests: from here on this is a snapshot."""
        found = {name: FileContent(self.files[name].size, digest) for name, digest in digests.items()}
        contents = msgspec.msgpack.encode(found)
        body = notes + contents
        if self._notes.size < _LABEL.size + len(body):
            self._notes.resize(2 * (_LABEL.size + len(body)))
        memory = self._notes.map()
        memory[_LABEL.size : _LABEL.size + len(body)] = body
        numbers = (*at, ranks, len(notes), len(contents))
        label = (*numbers, _digest(numbers, body))
        _LABEL.pack_into(memory, 0, _MAGIC, 0, *label)
        _LABEL.pack_into(memory, 0, _MAGIC, _WHOLE, *label)

    def close(self) -> None:
        for segment in (self._notes, *self.files.values()):
            segment.close()
