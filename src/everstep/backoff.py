"""How long to pause before something that failed is tried again. Pure: time comes with each call."""

from __future__ import annotations

from everstep.deadlines import Deadlines


def pause_s(failures: int, first_s: float, longest_s: float, factor: float = 2.0) -> float:
    """The pause after this many failures in a row: ``first_s`` after one, then growing to ``longest_s``."""
    # The exponent is capped so that what fails for days can't overflow a float.
    return min(longest_s, first_s * factor ** min(failures - 1, 64)) if failures > 0 else 0.0


class Backoff:
    """The pause before a recovery: none for the first, then growing to a cap.

    A healthy stretch resets it: a new checkpoint or snapshot, or long enough without a failure.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._in_a_row = 0
        self._healthy_since: float | None = None

    def healthy(self, at: float) -> None:
        """Training goes on, since at least now."""
        if self._healthy_since is None:
            self._healthy_since = at

    def progressed(self) -> None:
        """Progress was saved: the next failure is not the same one again and again."""
        self._in_a_row = 0

    def next_pause(self, at: float) -> float:
        """How long to wait before the recovery from a failure noticed now."""
        limits = self._deadlines
        if self._healthy_since is not None and at - self._healthy_since >= limits.healthy_s:
            self._in_a_row = 0
        self._healthy_since = None
        self._in_a_row += 1
        return pause_s(
            self._in_a_row - 1, limits.backoff_first_s, limits.backoff_max_s, limits.backoff_factor
        )
