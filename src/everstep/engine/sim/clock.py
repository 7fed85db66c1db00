"""Virtual time: a queue of things to do, taken in order of their time, then of their making. Nothing
sleeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._made = 0

    def at(self, time: float, action: Action) -> None:
        """Do this at that time, or now if that has passed."""
        self._made += 1
        heapq.heappush(self._queue, (max(time, self.now), self._made, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def step(self, until: float) -> bool:
        """Do the next thing that is due by then. False, with the time moved on, when there is none."""
        if not self._queue or self._queue[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True


class Channel:
    """Messages between two parties: late, but in the order in which they were sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = 0.0

    def send(self, latency: float, deliver: Action) -> None:
        self._last = max(self._last, self._clock.now + latency)
        self._clock.at(self._last, deliver)
