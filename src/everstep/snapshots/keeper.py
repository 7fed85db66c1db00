"""A rank's snapshots: taken into slots, and kept there for as long as somebody may need them.

Slots of the host's memory outlive this process. One of them holds the snapshot that every rank has; another
one that this rank has taken since, and of which it isn't known yet whether every rank has it. Neither is
written over. Besides, a slot stays as it is while it is being uploaded.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from everstep.control.snapshots import At
from everstep.errors import ConfigError
from everstep.snapshots.content import Content, by_file, digest
from everstep.snapshots.layout import SHARED_FILE, Index, Layout, Shard, index_file
from everstep.snapshots.segments import Segment, Slot

FEWEST = 2
"""Slots without which there is no snapshot that all ranks have at every instant."""


class HostMemory(Protocol):
    """Slots that outlive this process, from whoever owns them."""

    @property
    def refused(self) -> str:
        """Why the last slots that were asked for could not be had."""
        ...

    def old_slots(self) -> list[tuple[int, Slot]]:
        """(number, slot) of those that this rank had before."""
        ...

    def new_slots(self, sizes: dict[str, int], count: int) -> list[tuple[int, Slot]]:
        """So many, or none."""
        ...

    def drop(self, number: int) -> None: ...


class Keeper:
    """Used from the training function's thread, from the one that listens, and from the one that uploads."""

    def __init__(self, rank: int, world_size: int, memory: HostMemory | None, kept: At | None) -> None:
        """``kept``: the snapshot that this rank starts from."""
        self._rank = rank
        self._world_size = world_size
        self._memory = memory
        self._slots: dict[int, Slot] | None = None
        """Those in the host's memory, by number; None: not asked for yet."""
        self._reading: list[Slot] = []
        self._kept = kept
        self._open: At | None = None
        """The one that this rank has taken, and of which it isn't known what becomes of it."""
        self._undriven = False
        self._changed = threading.Condition()
        self.refused = ""
        """Why the host's memory has no room for snapshots of this rank."""
        self._shape: dict[str, Shard] | None = None
        self._layouts: dict[str, Layout] = {}

    # ------------------------------------------------------------------ what is kept

    def find(self, at: At) -> Slot | None:
        """The snapshot of this rank that was taken then, if it is in the host's memory."""
        return next(
            (slot for slot in self._own().values() if slot.label is not None and slot.label.at == at), None
        )

    def _own(self) -> dict[int, Slot]:
        if self._slots is None:
            self._slots = dict(self._memory.old_slots()) if self._memory is not None else {}
        return self._slots

    def settled(self, kept: At | None, upto: At) -> None:
        """Every rank has ``kept``; nothing else up to ``upto`` is needed."""
        with self._changed:
            self._kept = kept
            if self._open is not None and self._open <= upto:
                self._open = None
            self._changed.notify_all()

    def undriven(self, now: bool) -> None:
        """Nobody is there to say what every rank has."""
        with self._changed:
            self._undriven = now
            self._changed.notify_all()

    def remembers(self, limit_s: float) -> bool:
        """Whether the next snapshot can go into the host's memory. Waits until it is known what becomes of
        the one before.
        """
        if self._memory is None:
            return False
        with self._changed:
            if not self._changed.wait_for(lambda: self._open is None or self._undriven, limit_s):
                raise RuntimeError(
                    f"rank {self._rank} has taken a snapshot of its state that other ranks have not taken "
                    f"after {limit_s:g} s (Deadlines.report_wait_s): every rank must report its state "
                    "equally often"
                )
            return self._open is None

    # ------------------------------------------------------------------ taking one

    def take(self, content: Content, at: At, step: int, places: Mapping[str, Any], *, remember: bool) -> Slot:
        """Copy a state into a slot, for somebody to read: ``release`` it after that. It is in the host's
        memory if that was to be (``remember``) and there is room.
        """
        self._check_shape(content.shards)
        slot = self._free() if remember else None
        if slot is None:
            slot = Slot.create("state", self._sizes)
        slot.clear()
        for name, layout in self._layouts.items():
            memory = slot.files[name].map()
            memory[: len(layout.header)] = layout.header
            content.copy_to(name, memory, layout.starts)
        index = Index(step, self._rank, self._world_size, content.tree, dict(content.shards), dict(places))
        notes = index.encoded()
        slot.finish(at, notes, digest(content.sums, slot, notes))
        with self._changed:
            self._reading.append(slot)
            if self.is_remembered(slot):
                self._open = at
        return slot

    def is_remembered(self, slot: Slot) -> bool:
        return slot in self._own().values()

    def read_again(self, slot: Slot) -> None:
        with self._changed:
            self._reading.append(slot)

    def release(self, slot: Slot) -> None:
        with self._changed:
            self._reading.remove(slot)
            if slot not in self._reading and not self.is_remembered(slot):
                slot.close()
            self._changed.notify_all()

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: layout.size for name, layout in self._layouts.items()}

    def _free(self) -> Slot | None:
        """A slot of the host's memory that nobody needs; None: it has no room."""
        assert self._memory is not None
        own = self._own()
        self._drop_misfits(own)
        with self._changed:
            slot = self._unneeded(own)
            if slot is not None:
                return slot
            # The first time all that are needed, so that it is known at once whether there is room.
            given = self._memory.new_slots(self._sizes, max(1, FEWEST - len(own)))
            own.update(given)
            if given:
                return given[0][1]
            if len(own) < FEWEST:
                self.refused = self._memory.refused
                self.forgo()
                return None
            # What is being uploaded is in the way, and there is no room to go round it.
            self._changed.wait_for(lambda: self._unneeded(own) is not None)
            return self._unneeded(own)

    def _unneeded(self, own: Mapping[int, Slot]) -> Slot | None:
        return next((slot for slot in own.values() if not self._is_needed(slot)), None)

    def _is_needed(self, slot: Slot) -> bool:
        label = slot.label
        is_kept = label is not None and self._kept is not None and label.at == self._kept
        return is_kept or slot in self._reading

    def _drop_misfits(self, own: dict[int, Slot]) -> None:
        """Slots of another state than this one: of code that has changed."""
        assert self._memory is not None
        for number, slot in list(own.items()):
            sizes = {name: segment.size for name, segment in slot.files.items()}
            if sizes != self._sizes and not self._is_needed(slot):
                del own[number]
                self._memory.drop(number)
                slot.close()

    def forgo(self) -> None:
        """Use no memory of the host any more."""
        if self._memory is not None:
            for number in [*self._own()]:
                self._memory.drop(number)
            self._memory, self._slots = None, {}

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
