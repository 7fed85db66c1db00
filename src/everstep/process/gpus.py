"""What processes use of this machine's NVIDIA GPUs, by NVML, the library that comes with their driver."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_INSUFFICIENT_SIZE = 7
_UNKNOWN = 2**64 - 1
"""NVML's number of bytes where it doesn't know."""
_ROOM = 128
"""Entries that a list of NVML's has room for at first. The driver of an H200 wants 72, whatever it lists."""
_TRIES = 4
_RECENT_S = 2.0
"""Over this time the driver averages how busy each process kept a GPU."""
_PATIENCE_S = 5.0
"""A driver in trouble may not answer for minutes. Starting one that was idle takes up to 3 s."""

_Number = TypeVar("_Number", int, float)


class GpuUse(NamedTuple):
    """What a group of processes uses of all GPUs."""

    busy: float | None
    """How many GPUs it keeps busy. None if the driver doesn't say, as for one that is split with MIG."""
    memory: int | None
    """Bytes, on all GPUs. None if the driver doesn't say."""


class _Gpu(NamedTuple):
    busy: float | None
    memory: int | None
    """Bytes that all processes use."""
    holders: dict[int, int | None]
    """Bytes of each process that uses it."""
    shares: dict[int, float]
    """How busy each process keeps it. Empty where the driver doesn't say, or only one process uses it."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Sample(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("at", ctypes.c_ulonglong),
        ("compute", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )


def used_by(groups: Mapping[int, Collection[int]]) -> dict[int, GpuUse]:
    """For each group of pids that uses a GPU. Empty where there is none, or its driver doesn't answer."""
    if not groups or _library() is None:
        return {}
    gpus = _Reading.newest().result()
    found = {name: _use(frozenset(pids), gpus) for name, pids in groups.items()}
    return {name: use for name, use in found.items() if use is not None}


def _use(pids: frozenset[int], gpus: list[_Gpu]) -> GpuUse | None:
    busy: list[float | None] = []
    memory: list[int | None] = []
    for gpu in gpus:
        own = pids & gpu.holders.keys()
        if not own:
            continue
        alone = len(own) == len(gpu.holders)
        told_apart = gpu.shares and not alone
        busy.append(sum(gpu.shares.get(pid, 0.0) for pid in own) if told_apart else gpu.busy)
        held = _sum([gpu.holders[pid] for pid in own])
        memory.append(gpu.memory if held is None and alone else held)
    return GpuUse(_sum(busy), _sum(memory)) if busy else None


def _sum(parts: list[_Number | None]) -> _Number | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


class _Reading(threading.Thread):
    """All GPUs, read once, in a thread that can be left behind if the driver doesn't answer."""

    _lock = threading.Lock()
    _newest: _Reading | None = None

    def __init__(self) -> None:
        super().__init__(name="everstep-gpus", daemon=True)
        self._gpus: list[_Gpu] = []
        self._until = time.monotonic() + _PATIENCE_S

    @classmethod
    def newest(cls) -> _Reading:
        """One that is under way, or a new one: there is at most one thread that waits for the driver."""
        with cls._lock:
            if cls._newest is None or not cls._newest.is_alive():
                cls._newest = cls()
                cls._newest.start()
            return cls._newest

    def run(self) -> None:
        self._gpus = _all()

    def result(self) -> list[_Gpu]:
        """Empty if it takes too long."""
        self.join(max(0.0, self._until - time.monotonic()))
        return self._gpus


# ---------------------------------------------------------------------- NVML


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None where it isn't installed, or is too old."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name in _FUNCTIONS:
            getattr(library, name)
    except (OSError, AttributeError):
        return None
    return library


_FUNCTIONS = (
    "nvmlInit_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization",
)


@functools.cache
def _initialised() -> Any:
    """The library; None if there is no driver that it can use."""
    library = _library()
    return library if library is not None and library.nvmlInit_v2() == _SUCCESS else None


def _all() -> list[_Gpu]:
    library, count = _initialised(), ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return []
    return [gpu for index in range(count.value) if (gpu := _read(library, index)) is not None]


def _read(library: Any, index: int) -> _Gpu | None:
    """None if it can't be reached, or doesn't say who uses it."""
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != _SUCCESS:
        return None
    processes = _listed(
        _Process,
        lambda count, found: library.nvmlDeviceGetComputeRunningProcesses_v3(handle, count, found),
    )
    if processes is None:
        return None
    holders: dict[int, int | None] = {}
    for each in processes:  # on a GPU that is split, a process may have several
        held = None if each.memory == _UNKNOWN else each.memory
        holders[each.pid] = _sum([holders.get(each.pid, 0), held])
    rates, memory = _Utilization(), _Memory()
    knows_rates = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == _SUCCESS
    knows_memory = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == _SUCCESS
    return _Gpu(
        rates.gpu / 100 if knows_rates else None,
        memory.used if knows_memory else None,
        holders,
        _shares(library, handle) if len(holders) > 1 else {},
    )


def _shares(library: Any, handle: ctypes.c_void_p) -> dict[int, float]:
    since = ctypes.c_ulonglong(int((time.time() - _RECENT_S) * 1e6))
    samples = _listed(
        _Sample,
        lambda count, found: library.nvmlDeviceGetProcessUtilization(handle, found, count, since),
    )
    newest = sorted(samples or [], key=lambda sample: sample.at)
    return {sample.pid: sample.compute / 100 for sample in newest}


def _listed(kind: type[ctypes.Structure], ask: Callable[[Any, Any], int]) -> list[Any] | None:
    """None if the driver won't say. The list may grow while it is asked for."""
    room = _ROOM
    for _ in range(_TRIES):
        count, found = ctypes.c_uint(room), (kind * room)()
        code = ask(ctypes.byref(count), found)
        if code == _SUCCESS:
            return found[: count.value]
        if code != _INSUFFICIENT_SIZE:
            return None
        room = max(2 * room, count.value)
    return None
