"""Ranks that others wait for: a checkpoint is committed once every rank has made the report that it is of."""

from __future__ import annotations

from collections.abc import Callable

from everstep.control.controller import Controller
from everstep.deadlines import Deadlines
from everstep.errors import EQUALLY_OFTEN
from everstep.identity import Incarnation
from everstep.saved.reports import ReportBook
from everstep.wording import named, verb

_Report = tuple[Incarnation, int]
"""An index, and whose it is."""


class Uncommitted:
    """Checkpoints that wait for ranks."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since: dict[_Report, float] = {}
        self._named: set[tuple[Incarnation, int]] = set()
        """Ranks that are known to be behind."""
        self._warned: set[_Report] = set()
        """Those of which the user was warned that they wait for long."""

    def look(self, controller: Controller, limits: Deadlines, now: float) -> None:
        seen: dict[_Report, float] = {}
        for group in controller.groups.values():
            if not (waiting := group.book.waiting):
                continue
            of = Incarnation(controller.epoch, group.number, group.generation)
            seen.update(((of, index), self._since.get((of, index), now)) for index in waiting)
            for index, folder in list(waiting.items())[:1]:
                report = (of, index)
                news = {(of, rank) for rank in group.book.behind(index)} - self._named
                if news and now - seen[report] > limits.report_warn_s:
                    self._named |= news
                    self._say(_why_uncommitted(group.book, index, folder))
                elif now - seen[report] > limits.commit_warn_s and report not in self._warned:
                    self._warned.add(report)
                    self._say(_why_uncommitted(group.book, index, folder))
        self._since = seen
        self._warned &= seen.keys()


def _why_uncommitted(book: ReportBook, index: int, folder: str) -> str:
    which = f"checkpoint {folder}" if folder else f"the checkpoint of report {index}"
    behind, uploads = book.behind(index), book.uploads(index)
    if behind:
        return (
            f"{which} can't be committed yet: {named('rank', behind)} {verb(behind, 'has', 'have')} not "
            f"finished report {index}. {EQUALLY_OFTEN}"
        )
    upload = verb(uploads, "uploads", "upload")
    return (
        f"{which} can't be committed yet: {named('rank', uploads)} still {upload} to it. Storage has time "
        "limits of Everstep's own; a checkpoint_upload_fn needs one of yours, so that it can't hang"
    )
