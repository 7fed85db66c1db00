"""When each host was last heard of. A host that is silent for too long counts as lost, with any engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from everstep.deadlines import Deadlines
from everstep.topology.slices import HostId


class Heartbeats:
    """Measures silence. Time in which this process itself didn't run doesn't count."""

    def __init__(self, deadlines: Deadlines, silent: Callable[[HostId, float], None]) -> None:
        self._interval = deadlines.heartbeat_interval_s
        self._timeout = deadlines.heartbeat_timeout_s
        self._asleep = deadlines.asleep_s
        self._silent = silent
        self._last: dict[HostId, float] = {}

    def watch(self, host: HostId) -> None:
        self._last[host] = time.monotonic()

    def received(self, host: HostId) -> None:
        if host in self._last:
            self._last[host] = time.monotonic()

    def forget(self, host: HostId) -> None:
        self._last.pop(host, None)

    async def run(self) -> None:
        """Silence before this call doesn't count."""
        before = time.monotonic()
        self._last = dict.fromkeys(self._last, before)
        while True:
            await asyncio.sleep(self._interval)
            now = time.monotonic()
            if now - before > self._interval + self._asleep:  # count anew
                self._last = dict.fromkeys(self._last, now)
            before = now
            for host, last in list(self._last.items()):
                if now - last > self._timeout:
                    self._silent(host, last)
