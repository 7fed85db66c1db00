"""The state that a rank reports: what is kept of it, and what of that is in storage."""

from __future__ import annotations

from typing import Any

from everstep.control.reports import Part
from everstep.errors import ConfigError
from everstep.snapshots.content import Restorable
from everstep.snapshots.keeper import Keeper, OwnRoom, files_of
from everstep.snapshots.segments import Slot
from everstep.storage.checkpoints import Share, upload_files
from everstep.storage.store import Store


class ReportedState:
    def __init__(self, epoch: int, rank: int, world_size: int, *, shares: bool) -> None:
        """``shares``: this rank writes what is the same at all ranks."""
        self._epoch = epoch
        self._rank = rank
        self._shares = shares
        self._keeper = Keeper(rank, world_size, OwnRoom())
        self._turn = 0
        self._newest: Slot | None = None
        """The newest snapshot, until it is on its way to storage."""

    def take(self, state: Restorable, index: int, step: int | None, places: dict[str, Any]) -> Slot:
        """A snapshot of it, pinned: ``release`` or ``upload`` it."""
        if not callable(getattr(state, "capture", None)):
            raise ConfigError(
                f"report(state=…) got a {type(state).__qualname__}",
                "give it an everstep.torch.State(model=…, optimizer=…)",
                "report.state",
            )
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(
                f"report(state=…) got step={step!r}",
                "give the number of the step that is done",
                "report.step",
            )
        self._newest = self._keeper.take(state.capture(), (self._epoch, index), step, places)
        return self._newest

    def release(self, slot: Slot) -> None:
        self._keeper.release(slot)

    def is_due(self, turn: int) -> bool:
        """Whether a turn to write has come that has not been taken."""
        due, self._turn = turn != self._turn, turn
        return due

    def unsaved(self) -> Slot | None:
        """The newest snapshot, pinned, if it isn't on its way to storage."""
        if self._newest is not None:
            self._keeper.pin(self._newest)
        return self._newest

    def saving(self, slot: Slot) -> None:
        if self._newest is slot:
            self._newest = None

    def upload(self, run: Store, share: Share, slot: Slot) -> Part:
        """This rank's files of a snapshot, straight from memory."""
        files, index = files_of(slot, self._rank, with_shared=self._shares)
        try:
            return upload_files(run, share, files)
        finally:
            index.close()
            self._keeper.release(slot)
