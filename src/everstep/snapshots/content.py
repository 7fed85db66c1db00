"""A state at one step, as it goes into a slot and comes back. Frameworks bring their own."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from everstep.errors import DamagedCheckpointError, LostSnapshotError
from everstep.snapshots.copying import Copying
from everstep.snapshots.digests import digest
from everstep.snapshots.layout import Index, Layout, Shard, index_file, rank_of_index, rank_of_tensors
from everstep.snapshots.segments import Segment, Slot, SlotRecord


class Content(Protocol):
    """What is to be saved."""

    @property
    def tree(self) -> dict[str, Any]: ...

    @property
    def shards(self) -> Mapping[str, Shard]:
        """This rank's tensors, by name."""
        ...

    def copy_to(self, file: str, segment: Segment, starts: Mapping[str, int]) -> Sequence[Copying]:
        """Write the tensors of a file to where they belong in it, as they are now: they may be changed once
        it returns. Returns what has still to get there.
        """
        ...


class Source(Protocol):
    """What is to be restored."""

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """Those whose index is here: all of them, or, where there are as many ranks as before, at least the
        one that restores.
        """
        ...

    def index(self, rank: int) -> Index: ...

    def file(self, name: str) -> mmap.mmap: ...


class Restorable(Protocol):
    """A ``State``, as a session sees it."""

    def capture(self) -> Content: ...

    def steps_done(self) -> int | None:
        """If the state knows."""
        ...

    def load(self, source: Source, rank: int) -> None:
        """Take over what the source has for this rank."""
        ...


def by_file(shards: Mapping[str, Shard]) -> dict[str, Layout]:
    files: dict[str, dict[str, Shard]] = {}
    for name, shard in shards.items():
        files.setdefault(shard.file, {})[name] = shard
    return {file: Layout(some) for file, some in files.items()}


class InMemory:
    """A snapshot in the memory of hosts, for a rank of as many as saved it, or of another number.

    ``find`` gives a rank's slot with these of its files, from any host.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        world_size: int,
        find: Callable[[int, Sequence[str]], Slot],
    ) -> None:
        self._rank = rank % world_size
        self.ranks = ranks
        self.world_size = world_size
        self._find = find
        self._indexes: dict[int, Index] = {}
        self._files: dict[str, mmap.mmap] = {}

    def index(self, rank: int) -> Index:
        if rank not in self._indexes:
            self._indexes[rank] = Index.decoded(_sound_record(self._find(rank, ()), rank).notes)
        return self._indexes[rank]

    def file(self, name: str) -> mmap.mmap:
        if name not in self._files:
            rank = rank_of_tensors(name)
            rank = self._rank if rank is None else rank
            slot = self._find(rank, [name])
            wanted, found = _sound_record(slot, rank).contents[name], slot.files[name]
            if found.size != wanted.size or digest(found) != wanted.digest:
                raise LostSnapshotError(rank, _DAMAGED)
            self._files[name] = slot.files[name].map()
        return self._files[name]


_DAMAGED = "is not what was put there"


def _sound_record(slot: Slot, rank: int) -> SlotRecord:
    record = slot.record
    if record is None or not record.is_sound:
        raise LostSnapshotError(rank, _DAMAGED)
    return record


class Folder:
    """The files of a committed checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ranks = [rank_of_index(path.name) for path in folder.iterdir()]
        self._ranks = sorted(rank for rank in ranks if rank is not None)
        self._indexes: dict[int, Index] = {}
        self._files: dict[str, mmap.mmap] = {}

    @property
    def ranks(self) -> Sequence[int]:
        return self._ranks

    @property
    def world_size(self) -> int:
        return self.index(self._ranks[0]).world_size

    def index(self, rank: int) -> Index:
        if rank not in self._indexes:
            self._indexes[rank] = Index.decoded(self._path(index_file(rank)).read_bytes())
        return self._indexes[rank]

    def file(self, name: str) -> mmap.mmap:
        if name not in self._files:
            with self._path(name).open("rb") as stream:
                self._files[name] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._files[name]

    def _path(self, name: str) -> Path:
        path = self._folder / name
        if not path.is_file():
            raise DamagedCheckpointError(str(self._folder), name, "is missing")
        return path
