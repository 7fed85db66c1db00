"""What a worker's time goes to, from one report to the next, by its own clock.

All of it together costs a few microseconds a report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from everstep.health.stragglers import Pace

T = TypeVar("T")

_WORTH_S = 0.01
"""Stalls are told once there is this much of them: a message costs some time, too."""


SAMPLE_S = 0.17
"""Steps shorter than this are told together: so little says nothing, and telling it costs something."""
_MOST_STEPS = 1 << 12


class _Spent(NamedTuple):
    """Seconds, of everything."""

    at: float
    ran: float
    queued: float
    loaded: float
    loaded_ran: float
    waited: float


_NOTHING = _Spent(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class StepTimes:
    """Used by the thread that trains."""

    def __init__(self) -> None:
        self.hides_waits = False
        """Ranks wait for each other in ways that nobody here sees: in collectives of a framework."""
        self.has_device = False
        """An accelerator computes, and the main thread may burn a processor while it waits for that, or for
        other ranks: what it runs then is no sign of work.
        """
        self._stalled = 0.0
        self._waited = 0.0
        self._loaded = self._loaded_ran = 0.0
        self._is_loading = False
        self._queue = _RunQueue()
        self._thread = 0
        """That steps are made by."""
        self._began: _Spent | None = None
        """Since when nothing is in the sample; nothing is measured while there is none."""
        self._sample = _NOTHING
        self._is_odd = False
        """The sample can't be compared with others."""
        self._steps = 0
        """Of the sample."""
        self._every = 1
        """So many are a sample: a power of two, since all ranks tell of the same ones."""

    # ------------------------------------------------------------------ steps

    def end_step(self, index: int, *, saves: bool) -> Pace | None:
        """The ``index``-th step is over. What it took, and those before it, if it is time to tell. If a
        report ``saves``, that is no part of the next step, which ``begin_step`` begins.
        """
        self._steps += 1
        due = index % self._every == 0
        if not due and not saves:
            return None
        self._stop()
        return self._take_sample() if due else None

    def begin_step(self) -> None:
        if self._began is None:
            self._thread = get_ident()
            self._began = self._spent()

    def spoil_step(self) -> None:
        """This one can't be compared with others."""
        self._is_odd = True

    def _stop(self) -> None:
        began, self._began = self._began, None
        if began is None or self._thread != get_ident():
            self._is_odd = True  # the first, or half of it another thread's
            return
        now = self._spent()
        self._sample = _Spent(*(a + b - c for a, b, c in zip(self._sample, now, began, strict=True)))

    def _take_sample(self) -> Pace | None:
        spent, steps, self._sample, self._steps = self._sample, self._steps, _NOTHING, 0
        odd, self._is_odd = self._is_odd, False
        if odd:
            return None
        if spent.at < SAMPLE_S and self._every < _MOST_STEPS:
            self._every *= 2
        elif spent.at > 4 * SAMPLE_S and self._every > 1:
            self._every //= 2
        from everstep.health.stragglers import Pace  # here: whoever only loads data has no need of it

        ran = 0.0 if self.has_device else max(0.0, spent.ran - spent.loaded_ran)
        return Pace(
            spent.at / steps,
            ran / steps,
            spent.queued / steps,
            spent.loaded / steps,
            spent.waited / steps,
            self.hides_waits,
            steps,
        )

    def _spent(self) -> _Spent:
        return _Spent(
            time.monotonic(),
            time.thread_time(),
            self._queue.seconds(),
            self._loaded,
            self._loaded_ran,
            self._waited,
        )

    # ------------------------------------------------------------------ what is in them

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

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Data is loaded inside the block, or waited for."""
        if self._is_loading:
            yield
            return
        self._is_loading, began, ran = True, time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._is_loading = False
            self._loaded += time.monotonic() - began
            self._loaded_ran += time.thread_time() - ran

    def take_stall(self, least_s: float = _WORTH_S) -> float:
        """Seconds that training has stood still, which nobody has been told yet; 0.0 if that is little."""
        if self._stalled < least_s:
            return 0.0
        stalled, self._stalled = self._stalled, 0.0
        return stalled


class _RunQueue:
    """How long this thread could have run, and got no processor; 0 where the kernel doesn't tell."""

    def __init__(self) -> None:
        self._thread = 0
        self._fd: int | None = None

    def seconds(self) -> float:
        if self._thread != get_ident():
            self._open()
        if self._fd is None:
            return 0.0
        return int(os.pread(self._fd, 64, 0).split()[1]) / 1e9

    def _open(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._thread = get_ident()
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._fd is not None:
            close(self._fd)


_current = StepTimes()
"""Of this process: whoever loads data has no session at hand."""


def use(times: StepTimes) -> None:
    """These are this process's from now on."""
    global _current
    _current = times


@contextmanager
def loading() -> Iterator[None]:
    """Data is loaded inside the block, or waited for."""
    with _current.loading():
        yield


def timed(items: Iterable[T]) -> Iterator[T]:
    """The same, where getting the next is loading data."""
    following = iter(items)
    while True:
        with loading():
            try:
                item = next(following)
            except StopIteration:
                return
        yield item
