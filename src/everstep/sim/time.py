"""Virtual time, and event loops that live in it. Nothing sleeps, and everything happens in one order."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

MOST_STEPS = 400_000
"""No schedule has as many; one that does goes round in circles."""


class RuleBroken(AssertionError):
    """Something that must always hold doesn't."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise RuleBroken(what)


class VirtualTime:
    def __init__(self) -> None:
        self.now = 0.0
        self.running: Process | None = None
        """Whose event loop is the running one."""
        self.error: BaseException | None = None
        self.over = False
        """Nothing more is to happen."""
        self._queue: list[tuple[float, int, Process | None, Callable[[], object]]] = []
        self._made = 0

    def at(self, when: float, action: Callable[[], object], process: Process | None = None) -> None:
        """Do this then; in that process, if one is given: when it goes on if it is paused, never if it is
        dead.
        """
        self._made = number = self._made + 1
        heapq.heappush(self._queue, (when if when > self.now else self.now, number, process, action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    def failed(self, error: BaseException) -> None:
        """Something that nobody caught: the schedule ends with it."""
        self.error = self.error or error

    def run(self, until: float, most: int | None = MOST_STEPS) -> None:
        """Do what is due, one thing after the other, until then or until it is over. ``most``: as many things
        as there can be.
        """
        steps = 0
        queue, pop = self._queue, heapq.heappop
        try:
            while queue and queue[0][0] <= until and not self.over:
                self.now, _, process, action = pop(queue)
                if process is None or (process is self.running and process.alive and not process.paused):
                    action()
                else:
                    process.do(action)
                if self.error is not None:
                    raise self.error
                steps += 1
                if steps == most:
                    raise RuleBroken(f"{steps} steps, and no end")
        finally:
            if self.running is not None:
                self.running = None
                asyncio._set_running_loop(None)


class Process:
    """A process with an event loop. It can be paused for any time, and killed at any instant."""

    def __init__(self, time: VirtualTime, name: str) -> None:
        self.time = time
        self.name = name
        self.alive = True
        self.paused = False
        self.loop = Loop(self)  # type: ignore[abstract]
        self._held_back: list[Callable[[], object]] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        def begin() -> None:
            task = self.loop.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

        self.do(begin)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.time.failed(error)

    def do(self, action: Callable[[], object]) -> None:
        """Run this in the process: now, or when it goes on, or never."""
        if not self.alive:
            return
        if self.paused:
            self._held_back.append(action)
            return
        time = self.time
        if time.running is not self:
            time.running = self
            asyncio._set_running_loop(self.loop)
        action()

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self.time.at(self.time.now + seconds, action, self)

    def pause(self, seconds: float) -> None:
        if self.alive and not self.paused:
            self.paused = True
            self.time.after(seconds, self._resume)

    def _resume(self) -> None:
        self.paused = False
        waiting, self._held_back = self._held_back, []
        for action in waiting:
            self.later(0.0, action)

    def kill(self) -> None:
        self.alive = False

    def bury(self) -> None:
        """After the schedule: what never ended doesn't complain when it is collected."""
        self.alive = False
        for task in [*self._tasks, *self.loop.tasks]:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            try:
                if coroutine is not None:
                    coroutine.close()
            except (RuntimeError, AssertionError):
                pass  # it wanted to clean up, and is dead


class Call:
    """A callback that waits for its turn. As ``asyncio.Handle``, of which a schedule makes very many."""

    __slots__ = ("_args", "_callback", "_when")

    def __init__(self, callback: Any, args: Any, when: float) -> None:
        self._callback = callback
        self._args = args
        self._when = when

    def __call__(self) -> None:
        if self._callback is not None:
            self._callback(*self._args)

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self._callback = self._args = None

    def cancelled(self) -> bool:
        return self._callback is None


class Loop(asyncio.AbstractEventLoop):
    """What coroutines, futures and tasks need of an event loop."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._time, self._at = process.time, process.time.at
        self.tasks: list[asyncio.Task[Any]] = []

    def time(self) -> float:
        return self._time.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        now = self._time.now
        # Futures and tasks bring a context, and never take back what they ask for: there is most of that.
        call = Call(callback, args, now) if context is None else partial(context.run, callback, *args)
        self._at(now, call, self._process)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self._time.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        if context is not None:
            callback, args = context.run, (callback, *args)
        call = Call(callback, args, when)
        self._at(when, call, self._process)
        return call

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **more)
        self.tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._process.alive and error is not None:
            self._process.time.failed(error)
