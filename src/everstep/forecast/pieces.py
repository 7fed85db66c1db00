"""A ledger over the whole of a forecast, which also knows the parts of it, for a picture."""

from __future__ import annotations

from everstep.control.ledger import Category, Ledger


class PiecewiseLedger(Ledger):
    """Host-seconds by category; and the same by piece of the run."""

    PIECES = 400

    def __init__(self, hosts: int, seconds: float) -> None:
        super().__init__()
        self.hosts = hosts
        self.seconds = seconds
        self.pieces = [dict.fromkeys(Category, 0.0) for _ in range(self.PIECES)]

    def charge(self, category: Category, workers: float, since: float, until: float) -> None:
        """What is after the end isn't counted."""
        self.charge_mixed({category: 1.0}, workers, since, until)

    def charge_mixed(self, shares: dict[Category, float], workers: float, since: float, until: float) -> None:
        """The same of time in which these took turns, evenly."""
        until = min(until, self.seconds)
        if until <= since or not workers:
            return
        for category, share in shares.items():
            super().charge(category, share * workers, since, until)
        width = self.seconds / self.PIECES
        first = min(int(since / width), self.PIECES - 1)
        last = min(int(until / width), self.PIECES - 1)
        for piece in range(first, last + 1):
            begins = since if piece == first else piece * width
            ends = until if piece == last else (piece + 1) * width
            for category, share in shares.items():
                self.pieces[piece][category] += share * workers * (ends - begins)
