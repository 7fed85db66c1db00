"""What a worker's time goes to, from one report to the next, by its own clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_WORTH_S = 0.01
"""Stalls are told once there is this much of them: a message costs some time, too."""


class StepTimes:
    """Used by the thread that trains."""

    def __init__(self) -> None:
        self._stalled = 0.0
        self._waited = 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Training stands still for a checkpoint inside the block, but for what it waits for other ranks."""
        began, waited = time.monotonic(), self._waited
        try:
            yield
        finally:
            self._stalled += time.monotonic() - began - (self._waited - waited)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for others inside the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began

    def take_stall(self, least_s: float = _WORTH_S) -> float:
        """Seconds that training has stood still, which nobody has been told yet; 0.0 if that is little."""
        if self._stalled < least_s:
            return 0.0
        stalled, self._stalled = self._stalled, 0.0
        return stalled
