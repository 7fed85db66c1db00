"""Where the time went: each second of each wanted worker in one category, and they add up.

The one definition of goodput: the share of steps that were not done again. Real runs are accounted for from
their journal (``driver.ledger``), forecasts as they are simulated.
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
    WAITING = "waiting for capacity"
    AWAY = "driver away"


BADPUT = {
    Category.CHECKPOINT: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Category.DETECT: "OTHER",
    Category.RESTART: "PROGRAM_STARTUP",
    Category.RESTORE: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Category.REDO: "WASTED_PROGRESS_FROM_DISRUPTION",
    Category.HANG: "OTHER",
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
