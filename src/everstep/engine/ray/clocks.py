"""A host's clock, read from here.

Monotonic clocks count from when a machine was booted, and can't be compared with each other. Times that an
agent or a worker has taken from its own are translated to the driver's before anything else uses them.
"""

from __future__ import annotations

import time

_DRIFT = 2e-4
"""How far two machines' clocks may run apart, in seconds a second. Crystals are some ten times better."""


class HostClock:
    """How far another host's monotonic clock is ahead of ours, from its answers to our questions.

    The host read its clock at some time between question and answer: the quicker the answer, the better that
    time is known. A good answer is worth less as it ages, since clocks drift and machines are paused.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._error = float("inf")
        self._taken = 0.0

    def answered(self, theirs: float, asked: float, now: float) -> None:
        """To a question at ``asked`` it has answered at ``now`` that its clock showed ``theirs``."""
        error = (now - asked) / 2
        if error <= self._error + (now - self._taken) * _DRIFT:
            self._ahead = theirs - (asked + now) / 2
            self._error = error
            self._taken = now

    def ours(self, theirs: float) -> float:
        """When that was, by our clock: never in the future, since it has happened."""
        now = time.monotonic()
        return min(theirs - self._ahead, now) if self._error < float("inf") else now
