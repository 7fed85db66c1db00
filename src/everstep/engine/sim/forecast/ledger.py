"""Where the time went: each second of each host in one category, and they add up."""

from __future__ import annotations

import enum


class Category(enum.StrEnum):
    STEP = "step"
    CHECKPOINT = "checkpoint stall"
    DETECT = "detect"
    RESTART = "restart"
    RESTORE = "restore"
    REDO = "redo"
    WAITING = "waiting for capacity"


class Ledger:
    """Host-seconds by category; and the same by piece of the run, for a picture of it."""

    PIECES = 400

    def __init__(self, hosts: int, seconds: float) -> None:
        self.hosts = hosts
        self.seconds = seconds
        self.total = dict.fromkeys(Category, 0.0)
        self.pieces = [dict.fromkeys(Category, 0.0) for _ in range(self.PIECES)]

    def charge(self, category: Category, hosts: int, since: float, until: float) -> None:
        """These hosts spent that time so; what is after the end isn't counted."""
        self.charge_mixed({category: 1.0}, hosts, since, until)

    def charge_mixed(self, shares: dict[Category, float], hosts: int, since: float, until: float) -> None:
        """The same of time in which these took turns, evenly."""
        until = min(until, self.seconds)
        if until <= since or not hosts:
            return
        for category, share in shares.items():
            self.total[category] += share * hosts * (until - since)
        width = self.seconds / self.PIECES
        first = min(int(since / width), self.PIECES - 1)
        last = min(int(until / width), self.PIECES - 1)
        for piece in range(first, last + 1):
            begins = since if piece == first else piece * width
            ends = until if piece == last else (piece + 1) * width
            for category, share in shares.items():
                self.pieces[piece][category] += share * hosts * (ends - begins)

    def share(self, category: Category) -> float:
        whole = self.hosts * self.seconds
        return self.total[category] / whole if whole else 0.0
