"""Uploads in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundUploads:
    """One at a time, in order; a few may wait."""

    def __init__(self, limit: int = 2) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._room = threading.BoundedSemaphore(limit)
        self._running: set[Future[None]] = set()

    def submit(self, work: Callable[[], None]) -> None:
        self._room.acquire()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="everstep-upload")
        future = self._pool.submit(work)
        self._running.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        self._running.discard(future)
        self._room.release()

    def wait(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
