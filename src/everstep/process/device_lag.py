"""Whether GPUs get on with what PyTorch gives them.

A kernel that never ends, or a collective on a GPU that a peer never joins, keeps the main thread of its
worker busy: it spins until the GPU is done. From outside that looks like work. So each GPU gets a mark after
what it has been given, and is looked at now and then whether it has come so far.

NVIDIA's driver is called as it is. Its calls are said not to wait, but they do where another thread has given
a GPU more than it can take, or waits for it with one of the driver's locks. So Python's lock is not held
meanwhile, which PyTorch does, and nothing but the next look waits for them.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from functools import cache
from typing import Any

_RELAXED = 2
"""Of CUDA's capture modes: what this thread does doesn't spoil a graph that another thread captures."""
_NO_TIMING = 2
_DEFAULT_STREAM = ctypes.c_void_p(1)
_NOT_READY = 600
_AT_ONCE_S = 0.1
"""A look that takes longer waits for a GPU, and is left to itself."""


class _DriverError(Exception):
    """The driver refused. Whoever uses the GPU is told, too."""


class DeviceLag:
    """Used from one thread, which isn't the one that trains."""

    def __init__(self) -> None:
        self._gpus: dict[int, _Gpu] = {}
        self._marked: dict[int, float] = {}
        """Since when GPUs have had a mark that they have not come to yet."""
        self._looking: threading.Thread | None = None
        self._since = 0.0
        """When that thread began, or training last got on."""

    def seconds(self, gets_on: bool) -> float:
        """How long ago the oldest thing was given to a GPU of this process that it hasn't finished; 0: there
        is none that was there at the last call already. While training ``gets_on``, nobody looks.
        """
        now = time.monotonic()
        if gets_on:
            self._marked, self._since = {}, now
            return 0.0
        if self._looking is None or not self._looking.is_alive():
            driver = _driver() if _torch_uses_gpus() else None
            if driver is None:
                return 0.0
            self._since = now
            self._looking = threading.Thread(
                target=self._look, args=(driver, self._marked), name="everstep-device", daemon=True
            )
            self._looking.start()
            self._looking.join(_AT_ONCE_S)
        since = [*self._marked.values()]
        if self._looking.is_alive():
            since.append(self._since)
        now = time.monotonic()
        return max((now - each for each in since), default=0.0)

    def _look(self, driver: Any, marked: dict[int, float]) -> None:
        count, mode = ctypes.c_int(), ctypes.c_int(_RELAXED)
        # Else this thread may not look at GPUs while another one captures a graph.
        if driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
            return
        if driver.cuDeviceGetCount(ctypes.byref(count)):
            return
        for number in range(count.value):
            gpu = self._gpus.setdefault(number, _Gpu(driver, number))
            try:
                if gpu.is_used() and not (number in marked and gpu.is_behind()):
                    now = time.monotonic()
                    gpu.mark()
                    marked[number] = now
            except _DriverError:
                marked.pop(number, None)


class _Gpu:
    """One GPU, with one mark. Any thread may use it, one at a time."""

    def __init__(self, driver: Any, number: int) -> None:
        self._driver = driver
        self._number = number
        self._device = ctypes.c_int()
        self._context, self._event = ctypes.c_void_p(), ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        if found := getattr(self._driver, name)(*arguments):
            raise _DriverError(f"{name} returned {found}")

    def is_used(self) -> bool:
        """Asking anything else of a GPU that this process doesn't use would take memory there."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), self._number)
        self._call("cuDevicePrimaryCtxGetState", self._device, ctypes.byref(flags), ctypes.byref(active))
        return bool(active.value)

    def mark(self) -> None:
        """After what it has been given. The mark before is gone."""
        if not self._context:
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        if not self._event:
            self._call("cuEventCreate", ctypes.byref(self._event), _NO_TIMING)
        self._call("cuEventRecord", self._event, _DEFAULT_STREAM)

    def is_behind(self) -> bool:
        """Whether it has not come to its mark yet."""
        self._call("cuCtxSetCurrent", self._context)
        found = self._driver.cuEventQuery(self._event)
        if found not in (0, _NOT_READY):
            raise _DriverError(f"cuEventQuery returned {found}")
        return bool(found)


def _torch_uses_gpus() -> bool:
    # Another thread may be importing it: then it has not all of its names yet.
    is_initialized = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


@cache
def _driver() -> ctypes.CDLL | None:
    """None where it isn't installed, or is too old to look without harm."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in ("cuThreadExchangeStreamCaptureMode", "cuDevicePrimaryCtxGetState"):
            getattr(driver, name)
    except (OSError, AttributeError):
        return None
    return driver
