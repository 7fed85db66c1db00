"""Snapshots that are copied while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol


class Copying(Protocol):
    """Tensors on their way into a slot."""

    def wait(self) -> float:
        """Until they are there. Returns how many seconds training was held up meanwhile. Any thread may call
        it, once.
        """
        ...


class UnderWay:
    """A snapshot of which some tensors are on their way. ``finish`` makes it one when they are there."""

    def __init__(self, parts: Sequence[Copying], finish: Callable[[], None]) -> None:
        self._parts = parts
        self._finish = finish
        self._began = time.monotonic()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def complete(self) -> None:
        """Wait until it is whole."""
        if self._thread is None:
            self._complete()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def complete_later(self, done: Callable[[float, float], None]) -> None:
        """In the background, then call ``done``: how long training was held up, and how long it took."""

        def run() -> None:
            try:
                held_s = self._complete()
                done(held_s, time.monotonic() - self._began)
            except BaseException as error:  # raised where the snapshot, or its room, is needed next
                self._error = error

        self._thread = threading.Thread(target=run, name="everstep-snapshot", daemon=True)
        self._thread.start()

    def _complete(self) -> float:
        held_s = sum(part.wait() for part in self._parts)
        self._finish()
        return held_s
