"""A worker's progress, in memory that it shares with its agent.

The worker counts; the agent reads the counts at any time, also while the worker is stopped or a C call keeps
Python's lock. Every field is one aligned word, so that it is read whole.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from everstep.health.vitals import StackPlace, Stage
from everstep.process import kernel
from everstep.protocol.stacks import SIGNAL

TICK_S = 0.5
"""How often a worker shows that Python code can run in it."""
_NAME = "everstep-progress"
_SIZE = 4096
_MOST_STACKS = 1 << 20
_LABEL = slice(256, 384)
_STAGES = tuple(Stage)
_PLACES = tuple(StackPlace)


class _Field(IntEnum):
    STAGE = 0
    MARKS = 1
    REPORTS = 2
    COLLECTIVES = 3
    TICKS = 4
    MAIN_THREAD = 5
    ALLOWED_MS = 6
    IN_SUBGROUPS = 7
    PLACE = 8
    ECHOES = 9
    DEVICE_MS = 10


def shared_memory() -> int:
    """A descriptor of memory for one worker's progress."""
    fd = kernel.anonymous_file(_NAME)
    os.truncate(fd, _SIZE)
    os.lseek(fd, _SIZE, os.SEEK_SET)  # stacks never overwrite the counts
    return fd


def page_of(pid: int) -> Page | None:
    """The memory of a worker of this machine, for processes other than its agent. None if it has none."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME} "):
                return Page(os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        pass  # it has ended, or is another user's
    return None


class Page:
    """The memory itself. Takes the descriptor over. What is written to the descriptor comes behind the
    counts: there ``faulthandler`` puts stacks.
    """

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE)
        self.words = memoryview(self._memory).cast("Q")
        """The fields."""

    def __getitem__(self, field: int) -> int:
        return self.words[field]

    def __setitem__(self, field: int, value: int) -> None:
        self.words[field] = value

    @property
    def label(self) -> str:
        return self._memory[_LABEL].rstrip(b"\0").decode(errors="replace")

    @label.setter
    def label(self, text: str) -> None:
        size = _LABEL.stop - _LABEL.start
        self._memory[_LABEL] = text.encode()[:size].ljust(size, b"\0")

    @property
    def echoes(self) -> bool:
        """Whether what the worker prints now is about the failure of another one."""
        return bool(self[_Field.ECHOES])

    def forget_stacks(self) -> None:
        os.truncate(self.fd, _SIZE)
        os.lseek(self.fd, _SIZE, os.SEEK_SET)  # the worker writes where this points: the descriptor is one

    @property
    def end(self) -> int:
        """Where stacks that are written from now on begin."""
        return os.fstat(self.fd).st_size

    def stacks(self, since: int = _SIZE) -> str:
        return os.pread(self.fd, _MOST_STACKS, since).strip(b"\0").decode(errors="replace")

    def close(self) -> None:
        self.words.release()
        self._memory.close()
        os.close(self.fd)


class Progress:
    """The worker's side."""

    def __init__(self, page: Page | None = None) -> None:
        self._page = page or Page()
        if page is not None:
            faulthandler.register(SIGNAL, file=page.fd, all_threads=True)
            self._page[_Field.MAIN_THREAD] = threading.main_thread().ident or 0  # it can be signalled now

    def echo(self) -> None:
        """This worker fails because another one has: what it prints from now on is about that."""
        self._page[_Field.ECHOES] = 1

    def enter(self, stage: Stage) -> None:
        self._page[_Field.STAGE] = _STAGES.index(stage)
        self._page[_Field.MARKS] += 1

    def beat(self) -> None:
        """The training function says that it gets on."""
        page = self._page
        if page[_Field.STAGE] == _FIRST_STEP:
            page[_Field.STAGE] = _TRAINING
        page[_Field.MARKS] += 1

    def reported(self) -> None:
        words = self._page.words
        words[_REPORTS] += 1
        if words[_STAGE] != _TRAINING and words[_STAGE] != _PAUSE:
            words[_STAGE] = _TRAINING

    @contextmanager
    def during(self, stage: Stage, label: str = "", allowed_s: float = 0.0) -> Iterator[None]:
        """In this stage inside the block, and in the one before after it, unless it has become another."""
        page, inside = self._page, _STAGES.index(stage)
        before = page[_Field.STAGE], page[_Field.ALLOWED_MS], page.label
        page.label, page[_Field.ALLOWED_MS] = label, int(allowed_s * 1000)
        self.enter(stage)
        try:
            yield
        finally:
            if page[_Field.STAGE] == inside:
                page[_Field.STAGE], page[_Field.ALLOWED_MS], page.label = before
            page[_Field.MARKS] += 1

    @contextmanager
    def waiting(self, place: StackPlace) -> Iterator[None]:
        """The block may wait for other ranks, in this place: one that stands still in it is not to blame."""
        page = self._page
        before, page[_Field.PLACE] = page[_Field.PLACE], _PLACES.index(place)
        try:
            yield
        finally:
            page[_Field.PLACE] = before

    def keep_ticking(
        self, collectives: Callable[[], tuple[int, int]], device_lag: Callable[[bool], float]
    ) -> None:
        """Show from a thread of its own that Python code can run here, count collectives (of all ranks, and
        of some), and look how far accelerators are behind: ``device_lag`` is told whether training has made
        progress since the last time.
        """
        ticking = threading.Thread(
            target=self._tick, args=(collectives, device_lag), name="everstep-tick", daemon=True
        )
        ticking.start()

    def _tick(self, collectives: Callable[[], tuple[int, int]], device_lag: Callable[[bool], float]) -> None:
        page, never, marks = self._page, threading.Event(), -1
        while True:
            page[_Field.TICKS] += 1
            page[_Field.COLLECTIVES], page[_Field.IN_SUBGROUPS] = collectives()
            before, marks = marks, Seen(page).marks
            page[_Field.DEVICE_MS] = int(1000 * device_lag(marks != before))
            never.wait(TICK_S)


class Seen:
    """The agent's side: what a page says now."""

    def __init__(self, page: Page) -> None:
        self.stage = _STAGES[page[_Field.STAGE]]
        self.reports = page[_Field.REPORTS]
        self.collectives = page[_Field.COLLECTIVES]
        self.marks = page[_Field.MARKS] + self.reports + self.collectives + page[_Field.IN_SUBGROUPS]
        self.ticks = page[_Field.TICKS]
        self.main_thread = page[_Field.MAIN_THREAD]
        self.allowed_s = page[_Field.ALLOWED_MS] / 1000
        self.label = page.label
        self.device_s = page[_Field.DEVICE_MS] / 1000
        self.place = _PLACES[page[_Field.PLACE]]
        """Where it waits for other ranks, if it does so in a function of Everstep's."""


_STAGE, _REPORTS = _Field.STAGE.value, _Field.REPORTS.value  # an enum's members are slow to look up
_TRAINING = _STAGES.index(Stage.TRAINING)
_PAUSE = _STAGES.index(Stage.PAUSE)
_FIRST_STEP = _STAGES.index(Stage.FIRST_STEP)
