"""Snapshots on their way to storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from everstep.saved.reports import Part
from everstep.saved.snapshots import At
from everstep.snapshots.layout import SHARED_FILE, index_file
from everstep.snapshots.segments import Segment, Slot
from everstep.storage.checkpoints import Share, upload_files
from everstep.storage.store import Store


def write(store: Store, share: Share, slot: Slot, *, with_shared: bool) -> Part:
    """Upload a rank's files of a snapshot, straight from memory. ``with_shared``: also what is the same at
    all ranks.
    """
    notes = slot.notes
    index = Segment.create("index", len(notes))
    try:
        index.map()[:] = notes
        files = {name: s.path for name, s in slot.files.items() if with_shared or name != SHARED_FILE}
        return upload_files(store, share, {index_file(share.rank): index.path, **files})
    finally:
        index.close()


class OwnMemory:
    """Slots of this process, where no agent has any: they go with it, and it writes them to storage itself.

    ``write`` does so in the background, and calls what it is given when that is over.
    """

    refused = ""

    def __init__(self, write: Callable[[Slot, Share, bool, Callable[[], None]], None]) -> None:
        self._write = write
        self._slots: dict[int, Slot] = {}
        self._storing: set[int] = set()
        self._last_number = 0
        self._changed = threading.Condition()

    def old_slots(self) -> list[tuple[int, Slot]]:
        return []

    def new_slots(self, sizes: dict[str, int], count: int, *, needed: bool) -> list[tuple[int, Slot]]:
        made = []
        for _ in range(count):
            self._last_number += 1
            self._slots[self._last_number] = Slot.create("state", sizes)
            made.append((self._last_number, self._slots[self._last_number]))
        return made

    def find(self, at: At, rank: int, files: Sequence[str]) -> Slot | None:
        return None

    def drop(self, number: int) -> None:
        del self._slots[number]

    def store(self, number: int, share: Share, *, held: bool) -> None:
        with self._changed:
            self._storing.add(number)
        self._write(self._slots[number], share, held, lambda: self._stored(number))

    def _stored(self, number: int) -> None:
        with self._changed:
            self._storing.discard(number)
            self._changed.notify_all()

    def storing(self) -> Collection[int]:
        with self._changed:
            return {*self._storing}

    def wait(self) -> None:
        with self._changed:
            before = len(self._storing)
            self._changed.wait_for(lambda: not before or len(self._storing) < before)
