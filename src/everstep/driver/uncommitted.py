"""Ranks that others wait for: a checkpoint is committed once every rank has made the report that it is of."""

from __future__ import annotations

from collections.abc import Callable

from everstep.control.controller import Controller
from everstep.control.deadlines import Deadlines
from everstep.control.reports import ReportBook

EQUALLY_OFTEN = (
    "Every rank must call report() equally often, with checkpoint=None where it has nothing to save"
)


_Report = tuple[int, int, int, int]
"""(epoch, group, generation, index)"""


class Uncommitted:
    """Checkpoints that wait for ranks."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since: dict[_Report, float] = {}
        self._named: set[tuple[int, int, int, int]] = set()
        """(epoch, group, generation, rank) of ranks that are known to be behind."""
        self._told: set[_Report] = set()
        """Those that are known to wait for long."""

    def look(self, controller: Controller, limits: Deadlines, now: float) -> None:
        seen: dict[_Report, float] = {}
        for group in controller.groups.values():
            of = (controller.epoch, group.number, group.generation)
            waiting = group.book.waiting
            seen.update(((*of, index), self._since.get((*of, index), now)) for index in waiting)
            for index, folder in list(waiting.items())[:1]:
                report = (*of, index)
                news = {(*of, rank) for rank in group.book.behind(index)} - self._named
                if news and now - seen[report] > limits.report_warn_s:
                    self._named |= news
                    self._say(_why_uncommitted(group.book, index, folder))
                elif now - seen[report] > limits.commit_warn_s and report not in self._told:
                    self._told.add(report)
                    self._say(_why_uncommitted(group.book, index, folder))
        self._since = seen
        self._told &= seen.keys()


def _why_uncommitted(book: ReportBook, index: int, folder: str) -> str:
    which = f"checkpoint {folder}" if folder else f"the checkpoint of report {index}"
    behind, uploads = book.behind(index), book.uploads(index)
    if behind:
        have = "has" if len(behind) == 1 else "have"
        return (
            f"{which} can't be committed yet: "
            f"{named(behind)} {have} not finished report {index}. "
            f"{EQUALLY_OFTEN}"
        )
    upload = "uploads" if len(uploads) == 1 else "upload"
    return (
        f"{which} can't be committed yet: {named(uploads)} still {upload} to it. Storage has time limits of "
        "Everstep's own; a checkpoint_upload_fn needs one of yours, so that it can't hang"
    )


def named(ranks: list[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
