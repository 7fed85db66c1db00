"""Signals while a driver runs: the first asks it to end, the second insists."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from everstep.control.events import StopKind
from everstep.driver.loop import Driver


def run_thread(thread: threading.Thread, driver: Driver) -> StopKind | None:
    """Wait for the driver; turn what the user or the system wants meanwhile into requests to it."""
    stopped: StopKind | None = None
    asked = 0

    def interrupted() -> None:
        nonlocal stopped, asked
        stopped = StopKind.INTERRUPT
        asked += 1
        driver.stop(stopped, now=asked > 1)
        if asked == 1:
            print("everstep: stopping the workers; Ctrl+C again ends them at once", file=sys.stderr)

    with (
        on_signal(signal.SIGTERM, lambda: driver.stop(StopKind.TERMINATE, False)),
        # Not an exception: a second one could hit us in the middle of dealing with the first.
        on_signal(signal.SIGINT, interrupted, instead_of=signal.default_int_handler),
    ):
        thread.start()
        while not driver.outcome.done.is_set():
            try:
                # Short waits: an exception thrown into this thread (a notebook's stop button) is seen in
                # between. Not thread.join(): an exception inside it makes Python believe that the thread has
                # ended.
                driver.outcome.done.wait(0.1)
            except KeyboardInterrupt:
                interrupted()
    return stopped


@contextmanager
def on_signal(number: int, act: Callable[[], None], instead_of: object = None) -> Iterator[None]:
    """While this lasts, the signal is a request. Only the main thread may say so; and with ``instead_of``,
    only where that is what the signal does otherwise.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or (instead_of is not None and signal.getsignal(number) is not instead_of):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        act()

    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def quiet(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """If nobody catches this one, no traceback through our waiting is shown: everything has been said."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if error is not interrupt:
            before(kind, error, trace)

    sys.excepthook = hook
    return interrupt
