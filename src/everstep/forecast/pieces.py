"""The ledger of a forecast: where the time went, in all and over time."""

from __future__ import annotations

from everstep.goodput import Category, Ledger


class PiecewiseLedger(Ledger):
    """Host-seconds by category, of the whole run and of each piece of it. The pieces are equally long."""

    PIECES = 400

    def __init__(self, hosts: int, seconds: float) -> None:
        super().__init__()
        self.hosts = hosts
        self.seconds = seconds
        self.pieces = [dict.fromkeys(Category, 0.0) for _ in range(self.PIECES)]

    def charge(self, category: Category, workers: float, since: float, until: float) -> None:
        """Time after the end of the run isn't counted."""
        self.charge_mixed({category: 1.0}, workers, since, until)

    def charge_mixed(self, shares: dict[Category, float], workers: float, since: float, until: float) -> None:
        """The same for time that these categories share evenly."""
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
