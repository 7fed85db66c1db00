"""Whether GPUs get on with what PyTorch gives them.

A kernel that never ends, or a collective on a GPU that a peer never joins, keeps the main thread of its
worker busy: it spins until the GPU is done. From outside that looks like work. So each GPU gets a mark after
what it has been given, and is looked at now and then whether it has come so far.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

_RELAXED = 2
"""Of CUDA's capture modes: what this thread does doesn't spoil a graph that another thread captures."""


class DeviceLag:
    """Used from one thread, which isn't the one that trains."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[Any, float]] = {}
        """By GPU: one that it has not come to yet, and since when."""
        self._may_look: bool | None = None
        """None: not known yet."""

    def seconds(self, gets_on: bool) -> float:
        """How long ago the oldest thing was given to a GPU of this process that it hasn't finished; 0: there
        is none that was there at the last call already. While training ``gets_on``, nobody looks.
        """
        if gets_on:
            self._marks.clear()
            return 0.0
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0.0
        if self._may_look is None:
            self._may_look = _disturbs_no_capture()
        if not self._may_look:
            return 0.0
        now = time.monotonic()
        for number in range(torch.cuda.device_count()):
            # Asking anything of a GPU that this process doesn't use would take memory there.
            if torch._C._cuda_hasPrimaryContext(number):
                self._look(torch, number, now)
        return max((now - since for _, since in self._marks.values()), default=0.0)

    def _look(self, torch: Any, number: int, now: float) -> None:
        mark, _ = self._marks.get(number, (None, 0.0))
        if mark is not None and not mark.query():
            return
        with torch.cuda.device(number):
            mark = torch.cuda.Event()
            mark.record(torch.cuda.default_stream(number))
        self._marks[number] = (mark, now)


def _disturbs_no_capture() -> bool:
    """Whether this thread may look at GPUs while another one captures a graph."""
    try:
        mode = ctypes.c_int(_RELAXED)
        return int(ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))) == 0
    except (OSError, AttributeError):
        return False
