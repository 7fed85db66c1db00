"""Trying again: inside one deadline, with pauses that grow and are drawn at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

# Not the module's own generator: that one is the user's, and seeded for reproducible training.
_draw = random.SystemRandom().random


def attempts(
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    draw: Callable[[], float] = _draw,
) -> Iterator[float]:
    """Yields the seconds that are left, once for each attempt. Ends when there is no time for another.

    Pauses are drawn between nothing and a bound that doubles, so that a thousand ranks that were refused
    together don't come back together.
    """
    deadline = clock() + limit_s
    bound = FIRST_PAUSE_S
    while True:
        yield max(0.0, deadline - clock())
        pause = draw() * bound
        bound = min(2 * bound, LONGEST_PAUSE_S)
        if clock() + pause >= deadline:
            return
        sleep(pause)
