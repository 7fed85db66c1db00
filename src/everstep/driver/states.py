"""When the state that workers report is due to be written to storage."""

from __future__ import annotations

from collections.abc import Callable

from everstep.agent import wire


class StatesDue:
    """Every so often, all ranks write at the same report."""

    def __init__(self, every_s: float, propose: Callable[[wire.AnyValue], None]) -> None:
        self._every_s = every_s
        self._propose = propose
        self._since = 0.0
        self._turn = 0

    def restart(self, now: float) -> None:
        """Workers start, from what is in storage or newer."""
        self._since = now

    def look(self, now: float) -> None:
        if now - self._since >= self._every_s:
            self._since = now
            self._turn += 1
            self._propose(wire.StateDue(self._turn))
