"""Checkpoints that were reported and could not be saved: at the end of a run, users get a list of them."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from everstep.control.controller import Controller
from everstep.identity import Incarnation
from everstep.saved.checkpoints import CheckpointRef
from everstep.wording import count, verb

_NAMED = 4
"""More reports than this are named by the first of them and the last."""


class UnsavedReports(msgspec.Struct, frozen=True):
    """Those of the last attempt. What an earlier one did not save has been trained again since."""

    reports: list[int]
    why: str
    newest: CheckpointRef | None
    """The newest checkpoint that is saved."""

    def __str__(self) -> str:
        checkpoints = count(len(self.reports), "reported checkpoint")
        were = verb(self.reports, f"was not saved, that of report {_some(self.reports)}", "")
        were = were or f"were not saved, those of reports {_some(self.reports)}"
        why = f" ({self.why})" if self.why else ""
        if self.newest is None:
            return f"{checkpoints} {were}{why}. No checkpoint is saved"
        ref = self.newest
        return (
            f"{checkpoints} {were}{why}. The newest that is saved is {ref.folder}, "
            f"of report {ref.index} of attempt {ref.epoch}"
        )


class Unsaved:
    def __init__(self) -> None:
        self._why: dict[tuple[Incarnation, int], str] = {}

    def failed(self, of: Incarnation, index: int, why: str) -> None:
        self._why[of, index] = why

    def saved(self, of: Incarnation, index: int) -> None:
        self._why.pop((of, index), None)

    def at_the_end(self, controller: Controller, newest: CheckpointRef | None) -> UnsavedReports | None:
        """Also those that nobody will finish any more."""
        found: dict[int, str] = {}
        for group in controller.groups.values():
            of = Incarnation(controller.epoch, group.number, group.generation)
            found.update(dict.fromkeys([*group.book.waiting, *controller.committing(group)], ""))
            found.update({index: why for (whose, index), why in self._why.items() if whose == of})
        if not found:
            return None
        return UnsavedReports(sorted(found), next(filter(None, found.values()), ""), newest)


def _some(reports: Collection[int]) -> str:
    named = [*map(str, reports)]
    return ", ".join(named if len(named) <= _NAMED else [*named[:2], f"… {named[-1]}"])
