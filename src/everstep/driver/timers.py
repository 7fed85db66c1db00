"""The controller's timers, and what a driver does first that did not run for a while."""

from __future__ import annotations

import asyncio
import math

from everstep.control import commands as c, events as e
from everstep.driver.driven import DrivenRun

Key = tuple[e.TimerName, int]


class Timers:
    """By name and key. One that is set again is moved.

    Time in which the driver did not run doesn't count as silence of hosts. After such a gap, timers wait
    until the driver knows that the run is still its own, and what happened meanwhile.
    """

    def __init__(self, run: DrivenRun) -> None:
        self._run = run
        self._running: dict[Key, asyncio.TimerHandle] = {}
        self._waiting: dict[Key, None] = {}
        """Those that are due, in order, while the driver catches up."""
        self._catches_up = False
        self._ticks = False

    def set(self, command: c.SetTimer) -> None:
        key = (command.timer, command.key)
        self.cancel(*key)
        delay = max(0.0, command.at - self._run.clock.now())
        due = self._run.clock.now() + delay
        self._running[key] = asyncio.get_running_loop().call_later(delay, self._is_due, key, due)
        if not self._ticks:
            self._tick(self._run.clock.now())

    def cancel(self, timer: e.TimerName, key: int) -> None:
        self._waiting.pop((timer, key), None)
        handle = self._running.pop((timer, key), None)
        if handle is not None:
            handle.cancel()

    def _is_due(self, key: Key, due: float) -> None:
        del self._running[key]
        self._waiting[key] = None
        self._notice_gap(due)
        if not self._catches_up:
            self._fire()

    def _fire(self) -> None:
        while self._waiting:  # the controller may cancel or move the others
            timer, key = next(iter(self._waiting))
            del self._waiting[timer, key]
            self._run.emit(e.TimerFired(at=self._run.clock.now(), timer=timer, key=key))

    # ------------------------------------------------------------------ after a gap

    def _tick(self, due: float) -> None:
        """Beside timers, so that a gap is noticed that ends shortly after one was due, too."""
        self._notice_gap(due)
        self._ticks = bool(self._running)
        if self._ticks:
            pause = self._run.limits.asleep_s
            asyncio.get_running_loop().call_later(pause, self._tick, self._run.clock.now() + pause)

    def _was_asleep(self, due: float) -> bool:
        return self._run.clock.now() - due > self._run.limits.asleep_s

    def _notice_gap(self, due: float) -> None:
        """Something that was due then happens now."""
        if self._was_asleep(due) and not self._catches_up:
            self._catches_up = True
            self._run.spawn(self._catch_up())

    async def _catch_up(self) -> None:
        """Check the lease first. Then wait until heartbeats of all agents that live have come, and hosts that
        are silent count as lost.
        """
        limits, due = self._run.limits, -math.inf
        while self._was_asleep(due):
            await self._run.look_at_lease(limits.storage_answer_s)
            listen_s = limits.heartbeat_timeout_s + 2 * limits.heartbeat_interval_s
            due = self._run.clock.now() + listen_s
            await asyncio.sleep(listen_s)
        self._catches_up = False
        self._fire()
