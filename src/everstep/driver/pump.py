"""Events to the controller, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller


class Pump:
    """Gives events to the controller one after the other. What a command brings about waits its turn."""

    def __init__(
        self,
        controller: Controller,
        carry_out: Callable[[c.AnyCommand], None],
        handled: Callable[[e.Event], None],
    ) -> None:
        self._controller = controller
        self._carry_out = carry_out
        self._handled = handled
        self._queue: deque[e.Event] = deque()
        self._busy = False

    def put(self, event: e.Event) -> None:
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
