"""Events to the controller, one after the other, and those that time brings."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller
from everstep.driver.clock import Clock


class Pump:
    """Gives events to the controller one after the other. What a command brings about waits its turn."""

    def __init__(
        self,
        controller: Controller,
        carry_out: Callable[[c.AnyCommand], None],
        handled: Callable[[e.AnyEvent], None],
    ) -> None:
        self._controller = controller
        self._carry_out = carry_out
        self._handled = handled
        self._queue: deque[e.AnyEvent] = deque()
        self._busy = False

    def put(self, event: e.AnyEvent) -> None:
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                event = self._queue.popleft()
                for command in self._controller.handle(event):
                    self._carry_out(command)
                self._handled(event)
        finally:
            self._busy = False


class Timers:
    """The controller's, by name and key. One that is set again is moved."""

    def __init__(self, clock: Clock, emit: Callable[[e.AnyEvent], None]) -> None:
        self._clock = clock
        self._emit = emit
        self._running: dict[tuple[e.TimerName, int], asyncio.TimerHandle] = {}

    def set(self, command: c.SetTimer) -> None:
        key = (command.timer, command.key)
        self.cancel(*key)
        delay = max(0.0, command.at - self._clock.now())
        self._running[key] = asyncio.get_running_loop().call_later(delay, self._fired, key)

    def cancel(self, timer: e.TimerName, key: int) -> None:
        handle = self._running.pop((timer, key), None)
        if handle is not None:
            handle.cancel()

    def _fired(self, key: tuple[e.TimerName, int]) -> None:
        self._running.pop(key, None)
        self._emit(e.TimerFired(at=self._clock.now(), timer=key[0], key=key[1]))
