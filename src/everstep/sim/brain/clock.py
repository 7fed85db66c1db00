"""Virtual time: a queue of things to do, taken in order of their time, then of their making. Nothing
sleeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from everstep.sim.brain.violation import Violation

Action = Callable[[], None]

MOST = 40_000
"""No schedule has as many events; one that does goes round in circles."""


class EventClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._made = 0

    def at(self, time: float, action: Action) -> None:
        """Do this at that time, or now if that has passed."""
        self._made += 1
        heapq.heappush(self._queue, (time if time > self.now else self.now, self._made, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False, most: int | None = MOST) -> int:
        """Do what is due by then, one thing after the other; how many there were. The time has moved on to
        then, unless it was over before.
        """
        queue, done = self._queue, 0
        while queue and queue[0][0] <= until:
            if is_over():
                return done
            self.now, _, action = heapq.heappop(queue)
            action()
            done += 1
            if done == most:
                raise Violation(f"7: {most} events, and no end")
        self.now = max(self.now, until)
        return done


class ModelChannel:
    """Messages between two parties: late, but in the order in which they were sent."""

    def __init__(self, clock: EventClock) -> None:
        self._clock = clock
        self._last = 0.0

    def send(self, latency: float, deliver: Action) -> None:
        arrival = self._clock.now + latency
        self._last = arrival if arrival > self._last else self._last
        self._clock.at(self._last, deliver)
