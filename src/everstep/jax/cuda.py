"""Copies between an NVIDIA GPU and the host's memory, by its driver.

JAX copies to the host by way of memory of its own, which takes a processor and, on an H200, 0.3 s for a
gigabyte: for half of that time training made no steps. The driver copies straight into memory that it has
been told of, in 0.02 s, and training doesn't notice.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import numpy as np

from everstep.snapshots.segments import Segment

CHUNK = 32 << 20
"""Bytes of a segment that are registered with the driver at once. That holds up nothing that trains."""
PIECE = 16 << 20
"""Bytes that are copied at once. What training reads from the GPU waits for them. A chunk has several."""
_PAGE = 4096
_NON_BLOCKING = 1


class CudaError(Exception):
    """The driver refused."""


class Gpu:
    """One GPU. Any thread may use it, one at a time."""

    def __init__(self, driver: ctypes.CDLL, ordinal: int) -> None:
        self._driver = driver
        device, self._context, self._stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        # The one that JAX uses, too. It goes with the process.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        with self._chosen():
            self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self._registered: dict[Segment, list[int]] = {}
        """Addresses of chunks that the driver knows of."""

    def _call(self, name: str, *arguments: Any) -> None:
        found = getattr(self._driver, name)(*arguments)
        if found:
            raise CudaError(f"{name} returned {found}")

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        """A thread has to say which GPU it means. Training's own thread may mean another one after this."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def bring(self, source: int, segment: Segment, start: int, size: int) -> None:
        """From the GPU's memory into a segment. Returns once it is there."""
        with self._chosen():
            address = self._register(segment)
            end = start + size
            while start < end:
                stop = min(end, (start // PIECE + 1) * PIECE)
                self._call(
                    "cuMemcpyDtoHAsync_v2",
                    ctypes.c_void_p(address + start),
                    ctypes.c_uint64(source),
                    ctypes.c_size_t(stop - start),
                    self._stream,
                )
                self._call("cuStreamSynchronize", self._stream)
                source, start = source + stop - start, stop

    def _register(self, segment: Segment) -> int:
        """Returns where the segment is. What the driver won't know of is copied more slowly, that's all."""
        memory = segment.map()
        address = _address(memory)
        if segment not in self._registered:
            known = self._registered[segment] = []
            segment.before_unmapping(partial(self._forget, segment))
            for start in range(0, len(memory), CHUNK):
                size = min(CHUNK, len(memory) - start)
                # Else the kernel looks for free pages while the driver keeps the GPU.
                np.frombuffer(memory, np.uint8, size, start)[::_PAGE].sum()
                began = time.monotonic()
                try:
                    self._call(
                        "cuMemHostRegister_v2", ctypes.c_void_p(address + start), ctypes.c_size_t(size), 0
                    )
                except CudaError:
                    break
                known.append(address + start)
                time.sleep(time.monotonic() - began)  # let training give the GPU its work
        return address

    def _forget(self, segment: Segment) -> None:
        """A driver that refuses has lost its GPU: then there is nothing left to forget."""
        known = self._registered.pop(segment)
        with suppress(CudaError), self._chosen():
            for address in known:
                with suppress(CudaError):
                    self._call("cuMemHostUnregister", ctypes.c_void_p(address))


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@cache
def gpu_of(device: Any) -> Gpu | None:
    """The GPU that a JAX device is; None: it is none of NVIDIA's."""
    if device.platform != "gpu":
        return None
    try:
        return Gpu(ctypes.CDLL("libcuda.so.1"), device.local_hardware_id)
    except (OSError, AttributeError, CudaError):
        return None
