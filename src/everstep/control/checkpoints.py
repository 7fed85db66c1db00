"""Which checkpoints are committed, which are being committed, and which is the newest."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from everstep.control.events import CheckpointRef
from everstep.control.snapshots import At


class Checkpoints:
    """The newest is what a start restores.

    Within one incarnation of a group the higher index is newer. Between groups, and between the
    incarnations of one (whose count begins anew), it is the one that was complete later.
    """

    def __init__(self, committed: Iterable[CheckpointRef] = (), let_go: Iterable[CheckpointRef] = ()) -> None:
        self.newest: CheckpointRef | None = None
        self._committing: dict[str, CheckpointRef] = {}
        self._kept: dict[str, CheckpointRef] = {}
        """Those that can be restored, by folder."""
        self._newest_order = 0
        """The highest order of the newest's incarnation."""
        self._last_order = 0
        self._highest: dict[tuple[int, int, int], int] = {}
        for ref in committed:
            self.begin(ref)
            self.committed(ref.folder, ref.state)
        for ref in let_go:
            self._last_order = max(self._last_order, ref.order)
            self._highest[_incarnation(ref)] = max(ref.index, self.highest(*_incarnation(ref)))

    def begin(self, ref: CheckpointRef) -> CheckpointRef:
        """It is complete, and is being committed. Returns it with its order."""
        self._last_order = max(self._last_order + 1, ref.order)
        ref = msgspec.structs.replace(ref, order=ref.order or self._last_order)
        self._committing[ref.folder] = ref
        return ref

    def committed(self, folder: str, state: bool = False) -> CheckpointRef | None:
        """The answer to a commit of ours; None if there was none. ``state``: what it turned out to hold."""
        ref = self._committing.pop(folder, None)
        if ref is not None:
            ref = msgspec.structs.replace(ref, state=state)
            self._add(ref)
        return ref

    def holds_newer(self, snapshot: At) -> bool:
        """Whether a training state is committed that is further than this one."""
        return any(ref.state and (ref.epoch, ref.index) > snapshot for ref in self._kept.values())

    def failed(self, folder: str) -> bool:
        return self._committing.pop(folder, None) is not None

    def under_way(self, groups: Collection[int] | None = None) -> bool:
        """Whether a commit of these groups, or of any, has not been answered."""
        return any(groups is None or ref.group in groups for ref in self._committing.values())

    def committing(self, epoch: int, group: int, generation: int) -> set[int]:
        """Reports of that incarnation whose checkpoints are being committed."""
        of = (epoch, group, generation)
        return {ref.index for ref in self._committing.values() if _incarnation(ref) == of}

    def highest(self, epoch: int, group: int, generation: int) -> int:
        """The highest committed index of that incarnation."""
        return self._highest.get((epoch, group, generation), 0)

    def lost_since(self, epoch: int, index: int) -> int:
        """How many of an epoch's reports up to ``index`` the newest checkpoint doesn't hold."""
        newest = self.newest
        return max(0, index - (newest.index if newest is not None and newest.epoch == epoch else 0))

    def _add(self, ref: CheckpointRef) -> None:
        key = _incarnation(ref)
        self._kept[ref.folder] = ref
        if ref.index > self._highest.get(key, 0):
            self._highest[key] = ref.index
            self._compare(ref)

    def _compare(self, ref: CheckpointRef) -> None:
        newest = self.newest
        if newest is not None and _incarnation(ref) == _incarnation(newest):
            self._newest_order = max(ref.order, self._newest_order)
            if ref.index > newest.index:
                self.newest = ref
        elif (
            newest is None
            or ref.epoch > newest.epoch
            or (ref.epoch == newest.epoch and ref.order > self._newest_order)
        ):
            self.newest = ref
            self._newest_order = ref.order

    def forget(self, folder: str) -> None:
        """It can't be restored, or was let go. If it was the newest, the newest of those left is that now."""
        self._kept.pop(folder, None)
        if self.newest is not None and self.newest.folder == folder:
            self.newest = None
            seen: dict[tuple[int, int, int], int] = {}
            for ref in sorted(self._kept.values(), key=lambda ref: ref.order):
                if ref.index > seen.get(_incarnation(ref), 0):
                    seen[_incarnation(ref)] = ref.index
                    self._compare(ref)


def _incarnation(ref: CheckpointRef) -> tuple[int, int, int]:
    return (ref.epoch, ref.group, ref.generation)
