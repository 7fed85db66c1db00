"""A rank's snapshots: taken into slots, and kept there for as long as somebody may need them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from everstep.errors import ConfigError
from everstep.snapshots.content import Content, by_file, digest
from everstep.snapshots.layout import SHARED_FILE, Index, Layout, Shard, index_file
from everstep.snapshots.segments import Segment, Slot


class Room(Protocol):
    """Where slots come from."""

    def slot(self, sizes: Mapping[str, int]) -> Slot:
        """A new one, with files of these sizes."""
        ...


class OwnRoom:
    """Memory of this process, which goes with it."""

    def slot(self, sizes: Mapping[str, int]) -> Slot:
        return Slot.create("state", sizes)


class Keeper:
    """Used from the training function's thread, and from the one that uploads."""

    def __init__(self, rank: int, world_size: int, room: Room) -> None:
        self._rank = rank
        self._world_size = world_size
        self._room = room
        self._slots: list[Slot] = []
        self._pinned: list[Slot] = []
        self._shape: dict[str, Shard] | None = None
        self._layouts: dict[str, Layout] = {}
        self._changed = threading.Condition()

    def take(self, content: Content, at: tuple[int, int], step: int, places: Mapping[str, Any]) -> Slot:
        """Copy a state into a slot, and pin that: ``release`` it once it isn't read any more."""
        self._check_shape(content.shards)
        slot = self._free()
        slot.clear()
        for name, layout in self._layouts.items():
            memory = slot.files[name].map()
            memory[: len(layout.header)] = layout.header
            content.copy_to(name, memory, layout.starts)
        index = Index(step, self._rank, self._world_size, content.tree, dict(content.shards), dict(places))
        notes = index.encoded()
        slot.finish(at, notes, digest(content, slot, notes))
        return slot

    def pin(self, slot: Slot) -> None:
        """Somebody reads it."""
        with self._changed:
            self._pinned.append(slot)

    def release(self, slot: Slot) -> None:
        with self._changed:
            self._pinned.remove(slot)
            self._changed.notify_all()

    def _free(self) -> Slot:
        with self._changed:
            slot = next((slot for slot in self._slots if slot not in self._pinned), None)
            if slot is None:
                slot = self._room.slot({name: layout.size for name, layout in self._layouts.items()})
                self._slots.append(slot)
            self._pinned.append(slot)
            return slot

    def _check_shape(self, shards: Mapping[str, Shard]) -> None:
        if self._shape is None:
            self._shape = dict(shards)
            self._layouts = by_file(shards)
        elif self._shape != shards:
            raise _changed_shape(self._shape, shards)


def _changed_shape(before: Mapping[str, Shard], now: Mapping[str, Shard]) -> ConfigError:
    names = sorted(before.keys() | now.keys(), key=lambda name: (name not in before, name))
    name = next(name for name in names if before.get(name) != now.get(name))
    was, is_ = (_as_text(shards.get(name)) for shards in (before, now))
    return ConfigError(
        f"report(state=…): {name} was {was} in the first snapshot, and is {is_} now",
        "report a state whose tensors keep their names, shapes and types; report it for the first time after "
        "the first optimizer step, which makes the optimizer's state",
        f"State.{name}",
    )


def _as_text(shard: Shard | None) -> str:
    return "not there" if shard is None else f"{shard.dtype} {list(shard.global_shape)}"


def files_of(slot: Slot, rank: int, *, with_shared: bool) -> tuple[dict[str, Path], Segment]:
    """What a rank uploads of a snapshot, by name: plain files. The segment holds the index, and is to be
    closed after that.
    """
    index = Segment.create("index")
    index.resize(len(slot.notes))
    index.map()[:] = slot.notes
    files = {name: s.path for name, s in slot.files.items() if with_shared or name != SHARED_FILE}
    return {index_file(rank): index.path, **files}, index
