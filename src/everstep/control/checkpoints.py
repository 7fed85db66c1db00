"""Which checkpoints are committed, which are being committed, and which is the newest."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from everstep.control.events import CheckpointRef


class Checkpoints:
    """The newest is what a start restores.

    Within one incarnation of a group the higher index is newer. Between groups, and between the
    incarnations of one (whose count begins anew), it is the one that was complete later.
    """

    def __init__(self, committed: Iterable[CheckpointRef] = ()) -> None:
        self.newest: CheckpointRef | None = None
        self._committing: dict[str, tuple[int, CheckpointRef]] = {}
        self._line: list[CheckpointRef] = []
        """Those that were the newest, in that order; the last of them is."""
        self._newest_order = 0
        self._next_order = 0
        self._highest: dict[tuple[int, int, int], int] = {}
        for ref in committed:
            self.begin(ref)
            self.committed(ref.folder)

    def begin(self, ref: CheckpointRef) -> None:
        self._next_order += 1
        self._committing[ref.folder] = (self._next_order, ref)

    def committed(self, folder: str) -> CheckpointRef | None:
        """The answer to a commit of ours; None if there was none."""
        order, ref = self._committing.pop(folder, (0, None))
        if ref is not None:
            self._add(order, ref)
        return ref

    def failed(self, folder: str) -> bool:
        return self._committing.pop(folder, None) is not None

    def under_way(self, groups: Collection[int] | None = None) -> bool:
        """Whether a commit of these groups, or of any, has not been answered."""
        return any(groups is None or ref.group in groups for _, ref in self._committing.values())

    def highest(self, epoch: int, group: int, generation: int) -> int:
        """The highest committed index of that incarnation."""
        return self._highest.get((epoch, group, generation), 0)

    def lost_since(self, epoch: int, index: int) -> int:
        """How many of an epoch's reports up to ``index`` the newest checkpoint doesn't hold."""
        newest = self.newest
        return max(0, index - (newest.index if newest is not None and newest.epoch == epoch else 0))

    def _add(self, order: int, ref: CheckpointRef) -> None:
        key = _incarnation(ref)
        if ref.index <= self._highest.get(key, 0):
            return
        self._highest[key] = ref.index
        newest = self.newest
        if (
            newest is None
            or ref.epoch > newest.epoch
            or key == _incarnation(newest)
            or (ref.epoch == newest.epoch and order > self._newest_order)
        ):
            self.newest = ref
            self._line.append(ref)
            self._newest_order = max(order, self._newest_order)

    def forget(self, folder: str) -> None:
        """It can't be restored, or was let go. If it was the newest, the one before it is that again."""
        self._line = [ref for ref in self._line if ref.folder != folder]
        self.newest = self._line[-1] if self._line else None


def _incarnation(ref: CheckpointRef) -> tuple[int, int, int]:
    return (ref.epoch, ref.group, ref.generation)
