"""Which checkpoints are committed, which are being committed, and which is the newest."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from everstep.identity import Incarnation
from everstep.saved.snapshots import At


class CheckpointRef(msgspec.Struct, frozen=True):
    """A committed checkpoint: its folder and where in the run it stands."""

    folder: str
    epoch: int
    index: int
    group: int = 0
    generation: int = 0
    order: int = 0
    """Position in the order in which checkpoints of the run were first reported, from 1, whatever the order
    of their commits; 0: unknown.
    """
    state: bool = False
    """It holds the training state, as snapshots do, and not what the training function made itself."""

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.epoch, self.group, self.generation)


def in_order(refs: Iterable[CheckpointRef], let_go: Iterable[CheckpointRef]) -> list[CheckpointRef]:
    """The oldest first: within an incarnation of a replica group as they were reported, between incarnations
    by their order. Of what an earlier driver did not see reported, that is the order in which they became
    complete: an upload in the background may end after that of a later report, also of one that was let go
    since. ``let_go`` has the last of each incarnation.
    """
    complete: dict[Incarnation, int] = {}
    found = []
    every = [(ref, True) for ref in refs] + [(ref, False) for ref in let_go if ref.order]
    for ref, is_there in sorted(every, key=lambda entry: entry[0].index, reverse=True):
        key = ref.incarnation
        # Not later than those that were reported after it.
        order = complete[key] = min(ref.order, complete.get(key, ref.order))
        if is_there:
            found.append(((ref.epoch, order, ref.index), ref))
    return [ref for _, ref in sorted(found, key=lambda entry: entry[0])]


class Checkpoints:
    """The newest is what a start restores: the last of ``in_order``."""

    def __init__(self, committed: Iterable[CheckpointRef] = (), let_go: Iterable[CheckpointRef] = ()) -> None:
        self._newest: tuple[CheckpointRef, ...] | None = ()
        """None: it is to be found anew."""
        self._committing: dict[str, CheckpointRef] = {}
        self._held: set[str] = set()
        """Folders of those that are being committed while their ranks wait for that."""
        self._kept: dict[str, CheckpointRef] = {}
        """Those that can be restored, by folder."""
        self._last_order = 0
        self._highest: dict[Incarnation, int] = {}
        self._let_go: dict[Incarnation, CheckpointRef] = {}
        """The last of those that were, by incarnation."""
        self._since: dict[tuple[Incarnation, int], float] = {}
        """When a rank first reported that it saves its part of a report, to this driver."""
        self._orders: dict[tuple[Incarnation, int], int] = {}
        """Of those that are not complete yet."""
        for ref in let_go:
            self._last_order = max(self._last_order, ref.order)
            self._highest[ref.incarnation] = max(ref.index, self.highest(ref.incarnation))
            self._let_go[ref.incarnation] = ref
        for ref in committed:
            self.begin(ref)
            self.committed(ref.folder, ref.state)

    def reported(self, of: Incarnation, indices: Iterable[int], at: float) -> None:
        """A rank of this incarnation saves its parts of these reports, or has done so."""
        for index in indices:
            if (of, index) not in self._since:
                self._since[of, index] = at
                self._last_order = self._orders[of, index] = self._last_order + 1

    def since(self, ref: CheckpointRef) -> float | None:
        """When its state was reported; None: that isn't known."""
        return self.reported_at(ref.incarnation, ref.index)

    def reported_at(self, of: Incarnation, index: int) -> float | None:
        return self._since.get((of, index))

    def begin(self, ref: CheckpointRef, held: bool = False) -> CheckpointRef:
        """It is complete, and is being committed. Returns it with its order."""
        if held:
            self._held.add(ref.folder)
        order = ref.order or self._orders.pop((ref.incarnation, ref.index), self._last_order + 1)
        self._last_order = max(self._last_order, order)
        ref = msgspec.structs.replace(ref, order=order)
        self._committing[ref.folder] = ref
        return ref

    def committed(self, folder: str, state: bool = False) -> CheckpointRef | None:
        """The answer to a commit of ours; None if there was none. ``state``: what it turned out to hold."""
        ref = self._ended(folder)
        if ref is not None:
            ref = msgspec.structs.replace(ref, state=state)
            self._add(ref)
        return ref

    def is_held(self, folder: str) -> bool:
        """Whether it is being committed while its ranks wait for that."""
        return folder in self._held

    def holds_newer(self, snapshot: At) -> bool:
        """Whether a training state is committed that is further than this one."""
        return any(ref.state and (ref.epoch, ref.index) > snapshot for ref in self._kept.values())

    def failed(self, folder: str) -> bool:
        """The same, if it can't be committed. Whether there was such a commit."""
        return self._ended(folder) is not None

    def _ended(self, folder: str) -> CheckpointRef | None:
        self._held.discard(folder)
        return self._committing.pop(folder, None)

    def under_way(self, groups: Collection[int] | None = None) -> bool:
        """Whether a commit of these groups, or of any, has not been answered."""
        return any(groups is None or ref.group in groups for ref in self._committing.values())

    def committing(self, of: Incarnation) -> set[int]:
        """Reports of that incarnation whose checkpoints are being committed."""
        return {ref.index for ref in self._committing.values() if ref.incarnation == of}

    def highest(self, of: Incarnation) -> int:
        """The highest committed index of that incarnation."""
        return self._highest.get(of, 0)

    def lost_since(self, epoch: int, index: int) -> int:
        """How many of an epoch's reports up to ``index`` the newest checkpoint doesn't hold."""
        newest = self.newest
        return max(0, index - (newest.index if newest is not None and newest.epoch == epoch else 0))

    def _add(self, ref: CheckpointRef) -> None:
        key = ref.incarnation
        self._kept[ref.folder] = ref
        self._highest[key] = max(ref.index, self._highest.get(key, 0))
        self._newest = None

    @property
    def newest(self) -> CheckpointRef | None:
        if self._newest is None:
            self._newest = tuple(in_order(self._kept.values(), self._let_go.values())[-1:])
        return self._newest[0] if self._newest else None

    def forget(self, folder: str) -> None:
        """It can't be restored, or was let go. If it was the newest, the newest of those left is that now."""
        ref = self._kept.pop(folder, None)
        if ref is not None:
            before = self._let_go.get(ref.incarnation)
            if before is None or before.index < ref.index:
                self._let_go[ref.incarnation] = ref
            self._newest = None
