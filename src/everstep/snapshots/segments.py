"""Memory that outlives the process that fills it, for as long as another one holds a descriptor of it.

A slot holds one snapshot of one rank: its files, and notes that say what they are. The notes say that the
snapshot is whole, and that is written last and taken back first: whoever is killed while it writes leaves a
slot that nobody takes for a snapshot.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from everstep.control.snapshots import At

_LABEL = struct.Struct("<8sQQQQQ32s")
_MAGIC = b"everstp2"
_WHOLE = 1


class Segment:
    """An anonymous file in memory. The descriptor is its own, and is closed with it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._before_unmapping: list[Callable[[], None]] = []

    @classmethod
    def create(cls, name: str, size: int = 0) -> Segment:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(f"everstep-{name}", os.MFD_CLOEXEC)
        else:  # macOS: a file without a name
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        segment = cls(fd)
        segment.resize(size)
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
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size)
        return self._map

    def before_unmapping(self, release: Callable[[], None]) -> None:
        """Have this called before the mapping goes: for a device that was told of it."""
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
    digest: bytes

    @property
    def at(self) -> At:
        return At(self.epoch, self.index)


class Slot:
    """Room for one snapshot of a rank: notes, and files by name."""

    def __init__(self, notes: Segment, files: Mapping[str, Segment]) -> None:
        self._notes = notes
        self.files = dict(files)

    @classmethod
    def create(cls, name: str, sizes: Mapping[str, int]) -> Slot:
        files = {file: Segment.create(f"{name}-{file}", size) for file, size in sizes.items()}
        return cls(Segment.create(f"{name}-notes", _LABEL.size), files)

    @property
    def fds(self) -> list[int]:
        """Of the notes first, then of the files in the order of their names."""
        return [self._notes.fd, *(self.files[name].fd for name in sorted(self.files))]

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
        magic, state, epoch, index, ranks, notes, digest = _LABEL.unpack_from(self._notes.map())
        return Label(epoch, index, ranks, notes, digest) if (magic, state) == (_MAGIC, _WHOLE) else None

    @property
    def notes(self) -> bytes:
        label = self.label
        assert label is not None, "a slot without a snapshot has no notes"
        return self._notes.map()[_LABEL.size : _LABEL.size + label.notes]

    def clear(self) -> None:
        """What is here is no snapshot any more: it is about to be written over."""
        _LABEL.pack_into(self._notes.map(), 0, _MAGIC, 0, 0, 0, 0, 0, b"")

    def finish(self, at: At, ranks: int, notes: bytes, digest: bytes) -> None:
        """The files are written: from here on this is a snapshot."""
        if self._notes.size < _LABEL.size + len(notes):
            self._notes.resize(2 * (_LABEL.size + len(notes)))
        memory = self._notes.map()
        memory[_LABEL.size : _LABEL.size + len(notes)] = notes
        _LABEL.pack_into(memory, 0, _MAGIC, 0, *at, ranks, len(notes), digest)
        _LABEL.pack_into(memory, 0, _MAGIC, _WHOLE, *at, ranks, len(notes), digest)

    def close(self) -> None:
        for segment in (self._notes, *self.files.values()):
            segment.close()
