"""Where the time went: each second of each wanted worker in one category, and they add up.

The one definition of goodput: the share of steps that were not done again. Real runs are accounted for from
their journal (``journal.ledger``), forecasts as they are simulated.
"""

from __future__ import annotations

import enum


class Category(enum.StrEnum):
    STEP = "step"
    CHECKPOINT = "checkpoint stall"
    DETECT = "detect"
    RESTART = "restart"
    RESTORE = "restore"
    REDO = "redo"
    HANG = "hang"
    VALIDATION = "validation"
    WAITING = "waiting for capacity"
    AWAY = "driver away"


BADPUT = {
    Category.CHECKPOINT: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Category.DETECT: "OTHER",
    Category.RESTART: "PROGRAM_STARTUP",
    Category.RESTORE: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Category.REDO: "WASTED_PROGRESS_FROM_DISRUPTION",
    Category.HANG: "OTHER",
    Category.VALIDATION: "CUSTOM_BADPUT_EVENTS",
    Category.WAITING: "OTHER",
    Category.AWAY: "OTHER",
}
"""The names of ``BadputType`` in ml-goodput-measurement."""


class Ledger:
    """Seconds, times the workers that they were spent by."""

    def __init__(self) -> None:
        self.total = dict.fromkeys(Category, 0.0)

    def charge(self, category: Category, workers: float, since: float, until: float) -> None:
        """These workers spent that time so."""
        if until > since:
            self.total[category] += workers * (until - since)

    def share(self, category: Category) -> float:
        whole = sum(self.total.values())
        return self.total[category] / whole if whole else 0.0

    @property
    def goodput(self) -> float:
        return self.share(Category.STEP)

    def badput(self) -> dict[str, float]:
        """Seconds by ml-goodput-measurement's names."""
        found: dict[str, float] = {}
        for category, name in BADPUT.items():
            found[name] = found.get(name, 0.0) + self.total[category]
        return found


class LedgerOverTime(Ledger):
    """The same, and by slices of time. They are as wide as they must be for all of them to fit."""

    MOST = 240
    NARROWEST_S = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.began: float | None = None
        self.width = self.NARROWEST_S
        self.slices: list[dict[Category, float]] = []

    def charge(self, category: Category, workers: float, since: float, until: float) -> None:
        super().charge(category, workers, since, until)
        if until <= since or not workers:
            return
        if self.began is None:
            self.began = since
        while until - self.began > self.MOST * self.width:
            self._widen()
        at = max(0, int((since - self.began) / self.width))
        while since < until:
            ends = min(until, self.began + (at + 1) * self.width)
            while len(self.slices) <= at:
                self.slices.append({})
            spent = self.slices[at].get(category, 0.0)
            self.slices[at][category] = spent + workers * max(0.0, ends - since)
            since, at = max(since, ends), at + 1

    def _widen(self) -> None:
        """Two and two become one."""
        self.width *= 2
        found = []
        for at in range(0, len(self.slices), 2):
            both = dict(self.slices[at])
            for category, spent in (self.slices[at + 1] if at + 1 < len(self.slices) else {}).items():
                both[category] = both.get(category, 0.0) + spent
            found.append(both)
        self.slices = found

    def copy(self) -> LedgerOverTime:
        found = LedgerOverTime()
        found.total.update(self.total)
        found.began, found.width, found.slices = self.began, self.width, [*map(dict, self.slices)]
        return found
