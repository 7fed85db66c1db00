"""The driver's clocks. Real ones here; the simulator brings its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds of this machine's monotonic clock."""
        ...

    def wall(self) -> float:
        """UNIX time."""
        ...


class MachineClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
