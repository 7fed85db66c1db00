"""A rank's snapshots: taken into slots, and kept there for as long as they may be needed.

Slots lie in memory of the host, which outlives this process. One of them holds the snapshot that every rank
has; another one that this rank has taken since, and of which it isn't known yet whether every rank has it.
Where other hosts get copies, there are also the one that they have, and the one that they are getting. None
of these is written over. Besides, a slot stays as it is while it is being written to storage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from everstep.errors import ConfigError, LostSnapshotError, UnequalReportsError
from everstep.saved.snapshots import At
from everstep.snapshots.content import Content, by_file
from everstep.snapshots.copying import Copying, UnderWay
from everstep.snapshots.digests import digest
from everstep.snapshots.layout import Index, Layout, Shard
from everstep.snapshots.segments import Slot
from everstep.storage.checkpoints import Share

FEWEST = 2
"""Slots without which there is no snapshot that all ranks have at every instant."""
MOST = 4
"""With one that other hosts have copies of, one that they are getting, and a newer one."""


class HostMemory(Protocol):
    """Slots that outlive this process. Their owner writes them to storage.

    Used from the training function's thread only.
    """

    @property
    def refused(self) -> str:
        """Why the last slots that were asked for could not be had."""
        ...

    def old_slots(self) -> list[tuple[int, Slot]]:
        """(number, slot) of those that this rank had before."""
        ...

    def new_slots(self, sizes: dict[str, int], count: int, *, needed: bool) -> list[tuple[int, Slot]]:
        """So many, or none. ``needed``: without them nothing can be saved at all, so they are given in any
        case.
        """
        ...

    def find(self, at: At, rank: int, files: Sequence[str]) -> Slot | None:
        """What a rank had then, and these of its files, from any host; None: no host has it."""
        ...

    def drop(self, number: int) -> None: ...

    def store(self, number: int, share: Share, *, held: bool) -> None:
        """Write a slot to storage, in the background. ``held``: training waits for that."""
        ...

    def storing(self) -> Collection[int]:
        """Slots that are being written to storage now."""
        ...

    def wait(self) -> None:
        """Until one of these has been, if there are any."""
        ...


class Taken(NamedTuple):
    """A snapshot that was just taken."""

    number: int
    """Of its slot."""
    at: At
    remembered: bool
    """It stays until another one is whole."""


class Keeper:
    """Used from the training function's thread, and from the one that listens."""

    def __init__(self, rank: int, world_size: int, memory: HostMemory, kept: Sequence[At] = ()) -> None:
        """``kept``: the snapshot that this rank starts from, and others that may still be needed."""
        self._rank = rank
        self._world_size = world_size
        self._memory = memory
        self._slots: dict[int, Slot] | None = None
        """By number; None: not asked for yet."""
        self._kept = tuple(kept)
        self._open: At | None = None
        """The one that this rank has taken, and of which it isn't known what becomes of it."""
        self._copying: UnderWay | None = None
        """The one that was taken last, until it is whole."""
        self._undriven = False
        self._changed = threading.Condition()
        self._has_room = True
        self.refused = ""
        """Why the host's memory has no room for snapshots of this rank."""
        self._shape: dict[str, Shard] | None = None
        self._layouts: dict[str, Layout] = {}

    # ------------------------------------------------------------------ what is kept

    def find(self, at: At, rank: int, files: Sequence[str] = ()) -> Slot:
        """What a rank had then, with these of its files."""
        if rank == self._rank:
            for slot in self._own().values():
                if slot.label is not None and slot.label.at == at:
                    return slot
        found = self._memory.find(at, rank, files)
        if found is None:
            raise LostSnapshotError(rank, self._memory.refused or "is not there")
        return found

    def _own(self) -> dict[int, Slot]:
        if self._slots is None:
            self._slots = dict(self._memory.old_slots())
        return self._slots

    def settled(self, kept: Sequence[At], upto: At) -> None:
        """``kept`` are needed; nothing else up to ``upto`` is."""
        with self._changed:
            self._kept = tuple(kept)
            if self._open is not None and self._open <= upto:
                self._open = None
            self._changed.notify_all()

    def undriven(self, now: bool) -> None:
        """Whether there is no driver, which could know what every rank has."""
        with self._changed:
            self._undriven = now
            self._changed.notify_all()

    def remembers(self, limit_s: float) -> bool:
        """Whether the next snapshot can stay in the host's memory. Waits until it is known what becomes of
        the one before.
        """
        if not self._has_room:
            return False
        with self._changed:
            if not self._changed.wait_for(lambda: self._open is None or self._undriven, limit_s):
                raise UnequalReportsError(
                    f"rank {self._rank} has taken a snapshot of its state that other ranks have not taken "
                    f"after {limit_s:g} s (Deadlines.report_wait_s)"
                )
            return self._open is None

    def forgo(self) -> None:
        """Keep no snapshot but what is being written to storage."""
        self.complete()
        self._has_room = False
        with self._changed:
            self._kept, self._open = (), None
        self._drop(lambda slot: True)

    @property
    def why_not(self) -> str:
        """Why the last memory that it asked for could not be had."""
        return self._memory.refused

    # ------------------------------------------------------------------ taking one

    def take(
        self, content: Content, at: At, step: int, places: Mapping[str, Any], *, remember: bool
    ) -> Taken | None:
        """Copy a state into a slot. What changes after this returns is not in the snapshot, which may not be
        whole yet. ``remember``: only if it can stay there; else it is for ``store``, and goes after that.
        """
        self.complete()
        self._check_shape(content.shards)
        number = self._free(remember)
        if number is None:
            return None
        slot = self._own()[number]
        slot.clear()
        under_way: list[Copying] = []
        for name, layout in self._layouts.items():
            segment = slot.files[name]
            segment.map()[: len(layout.header)] = layout.header
            under_way += content.copy_to(name, segment, layout.starts)
        index = Index(step, self._rank, self._world_size, content.tree, dict(content.shards), dict(places))
        self._copying = UnderWay(under_way, partial(self._finish, slot, at, index))
        if remember:
            with self._changed:
                self._open = at
        if not under_way:
            self.complete()
        return Taken(number, at, remember)

    def _finish(self, slot: Slot, at: At, index: Index) -> None:
        digests = {name: digest(segment) for name, segment in slot.files.items()}
        slot.finish(at, self._world_size, index.encoded(), digests)

    @property
    def is_copying(self) -> bool:
        """Whether the snapshot that was taken last isn't whole yet."""
        return self._copying is not None

    def complete(self) -> None:
        """Wait until it is."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.complete()

    def complete_later(self, done: Callable[[float, float], None]) -> None:
        """Have that done in the background, and ``done`` called then: how many seconds training was held up,
        and how many it took.
        """
        if self._copying is not None:
            self._copying.complete_later(done)

    def store(self, taken: Taken, share: Share, *, held: bool) -> None:
        """Write it to storage, in the background. It has to be whole."""
        self._memory.store(taken.number, share, held=held)

    def has(self, taken: Taken) -> bool:
        """Whether its slot still holds it."""
        self.complete()
        slot = self._own().get(taken.number)
        return slot is not None and slot.label is not None and slot.label.at == taken.at

    def wait_for_storage(self) -> None:
        """Until all that was to be written is, or can't be."""
        while self._memory.storing():
            self._memory.wait()

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: layout.size for name, layout in self._layouts.items()}

    def _free(self, remember: bool) -> int | None:
        """A slot that isn't needed; None: there is no room for it."""
        own = self._own()
        while True:
            self._drop(lambda slot: not self._fits(slot))
            storing = self._memory.storing()
            for number, slot in own.items():
                # What has become superfluous since may be of another state, too.
                if number not in storing and self._fits(slot) and not self._is_needed(slot):
                    return number
            if remember and len(own) - len(storing) >= MOST:
                return None
            # The first time all that are needed, so that it is known at once whether there is room.
            count = max(1, FEWEST - len(own)) if remember else 1
            own.update(self._memory.new_slots(self._sizes, count, needed=not remember))
            if remember and len(own) < FEWEST:
                self.refused = self._memory.refused
                self.forgo()
                return None
            if all(number in storing or self._is_needed(slot) for number, slot in own.items()):
                if not storing:
                    return None  # until other hosts have copies of what is kept for them
                # What is being written is in the way, and there is no room to go round it.
                self._memory.wait()

    def _fits(self, slot: Slot) -> bool:
        return {name: file.size for name, file in slot.files.items()} == self._sizes

    def _is_needed(self, slot: Slot) -> bool:
        label = slot.label
        with self._changed:
            return label is not None and label.at in (*self._kept, self._open)

    def _drop(self, is_superfluous: Callable[[Slot], bool]) -> None:
        """Give back slots that aren't needed: of another state than this one, say of code that
        has changed.
        """
        own, storing = self._own(), self._memory.storing()
        for number, slot in list(own.items()):
            if number not in storing and not self._is_needed(slot) and is_superfluous(slot):
                del own[number]
                self._memory.drop(number)
                slot.close()

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
