"""The state that a rank reports: what is kept of it, and what of that is in storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from everstep.control.snapshots import At
from everstep.errors import ConfigError, LostSnapshotError
from everstep.snapshots.content import InMemory, Restorable, digest
from everstep.snapshots.keeper import HostMemory, Keeper, Taken
from everstep.snapshots.layout import Index, check_same, tree_of
from everstep.snapshots.segments import Slot
from everstep.storage.checkpoints import Share


class ReportedState:
    def __init__(
        self,
        epoch: int,
        rank: int,
        world_size: int,
        memory: HostMemory,
        snapshot: At | None,
        places: Callable[[], dict[str, Any]],
        first_of: Callable[[bytes], bytes],
    ) -> None:
        """``snapshot``: what this rank starts from, in its host's memory. ``places``: where it is in its data
        sets. ``first_of``: what the first rank gives, at all of them.
        """
        self._epoch = epoch
        self._rank = rank
        self._snapshot = snapshot
        self._places = places
        self._first_of = first_of
        self._is_checked = False
        self.keeper = Keeper(rank, world_size, memory, snapshot)
        self._turn = 0
        self._latest: tuple[Restorable, int] | None = None
        """What was reported last, until it is on its way to storage."""
        self._newest: Taken | None = None
        """The snapshot of that, if there is one."""
        self.copy_s = 0.0
        """How long the last one took."""

    # ------------------------------------------------------------------ restoring

    def remembered(self) -> Slot | None:
        """The snapshot that this rank starts from; None: it starts from storage, or from nothing."""
        if self._snapshot is None:
            return None
        slot = self.keeper.find(self._snapshot)
        if slot is None:
            raise LostSnapshotError(self._rank, "is not there")
        return slot

    def restore(self, state: Restorable) -> int | None:
        """From memory. Returns the step; None: it isn't there."""
        slot = self.remembered()
        if slot is None:
            return None
        label = slot.label
        assert label is not None, "it was found by its label"
        if digest(state.sums, slot, slot.notes) != label.digest:
            raise LostSnapshotError(self._rank, "is not what was put there")
        source = InMemory(slot)
        state.load(source, self._rank)
        return source.index(self._rank).step

    def restored_places(self) -> dict[str, Any] | None:
        """Where in its data sets the rank was, in the snapshot that it starts from."""
        slot = self.remembered()
        return None if slot is None else Index.decoded(slot.notes).places

    # ------------------------------------------------------------------ reporting

    def report(
        self, state: Restorable, index: int, step: int | None, *, every: int, due: bool, limit_s: float
    ) -> Taken | None:
        """Take a snapshot, if it is its turn (with ``every`` so-many-th report, 0: none) and the host's
        memory can have it, or one is due to be written.
        """
        at = At(self._epoch, index)
        number = _checked(state, step)
        if not self._is_checked:
            self._is_checked = True
            mine = tree_of(state.capture().shards)
            check_same(self._rank, mine, self._first_of(mine))
        self._latest, self._newest = (state, number), None
        began = time.monotonic()
        if not every:
            self.keeper.forgo()
        elif (due or index % every == 0) and self.keeper.remembers(limit_s):
            began = time.monotonic()
            self._newest = self._take(state, at, number, remember=True)
        if due and self._newest is None:
            self._newest = self._take(state, at, number, remember=False)
        if due:
            self.keeper.complete()  # it is going to be written from memory
        self.copy_s = time.monotonic() - began
        return self._newest

    def _take(self, state: Restorable, at: At, step: int, *, remember: bool) -> Taken | None:
        return self.keeper.take(state.capture(), at, step, self._places(), remember=remember)

    def is_due(self, turn: int) -> bool:
        """Whether a turn to write has come that has not been taken."""
        due, self._turn = turn != self._turn, turn
        return due

    def unsaved(self, index: int) -> Taken | None:
        """A snapshot of what was reported last, if it isn't on its way to storage."""
        if self._latest is None:
            return None
        if self._newest is not None and self.keeper.has(self._newest):
            return self._newest
        state, step = self._latest
        taken = self._take(state, At(self._epoch, index), step, remember=False)
        self.keeper.complete()
        return taken

    def store(self, taken: Taken, share: Share, *, held: bool) -> None:
        """Write what was reported last to storage, in the background."""
        self._latest = self._newest = None
        self.keeper.store(taken, share, held=held)


def _checked(state: Restorable, step: int | None) -> int:
    if not callable(getattr(state, "capture", None)):
        raise ConfigError(
            f"report(state=…) got a {type(state).__qualname__}",
            "give it an everstep.torch.State(model=…, optimizer=…) or an everstep.jax.State(params=…)",
            "report.state",
        )
    if step is None:
        step = state.steps_done()
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(
            f"report(state=…) got step={step!r}",
            "give the number of the step that is done, or a State with an everstep.data.Stream, which counts "
            "them",
            "report.step",
        )
    return step
