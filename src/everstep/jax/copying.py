"""How arrays get from devices into the host's memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from everstep.jax.cuda import CudaError, Gpu, gpu_of
from everstep.snapshots.copying import Copying
from everstep.snapshots.segments import Segment

_RESERVE = 0.1
"""Of a device's memory: what is left for training to grow into."""
_SHOWS = 0.1
"""How much of the time in which NVIDIA's driver copies to the host shows in training: hardly any of it did on
an H200.
"""


class ArrayPlace(NamedTuple):
    """An array on one device, or of the host, and where its bytes belong in a segment."""

    array: Any
    start: int


class ArrayCopier:
    """Arrays don't change, but a donated one is gone at the next call. So they are copied inside their
    device, and brought to the host while training goes on; at once from a device that has no room for that,
    and from the host's own memory.
    """

    def __init__(self) -> None:
        self._copy = jax.jit(lambda arrays: [jnp.copy(array) for array in arrays])

    def copy(self, places: Sequence[ArrayPlace], segment: Segment) -> list[Copying]:
        by_device: dict[Any, list[ArrayPlace]] = {}
        for place in places:
            by_device.setdefault(_device_of(place.array), []).append(place)
        later: list[Copying] = []
        for device, some in by_device.items():
            if device is not None and _has_room(device, sum(place.array.nbytes for place in some)):
                copies = self._copy([place.array for place in some])
                some = [ArrayPlace(copy, place.start) for copy, place in zip(copies, some, strict=True)]
                later.append(_Bringing(some, segment, gpu_of(device)))
            else:
                _bring(some, segment)
        return later


class _Bringing:
    """Copies that are on their device, and have to be brought to the host."""

    def __init__(self, places: Sequence[ArrayPlace], segment: Segment, gpu: Gpu | None) -> None:
        self._places = places
        self._segment = segment
        self._gpu = gpu

    def wait(self) -> float:
        jax.block_until_ready([place.array for place in self._places])
        began = time.monotonic()
        shows = self._bring()
        self._places = ()
        return shows * (time.monotonic() - began)

    def _bring(self) -> float:
        """Returns how much of the time that it took shows in training."""
        if self._gpu is not None:
            try:
                for place in self._places:
                    array = place.array
                    self._gpu.bring(array.unsafe_buffer_pointer(), self._segment, place.start, array.nbytes)
                return _SHOWS
            except CudaError:
                self._gpu = None
        _bring(self._places, self._segment)
        return 1.0  # training goes on, but may be as slow as if it waited


def _bring(places: Sequence[ArrayPlace], segment: Segment) -> None:
    for place in places:
        if isinstance(place.array, jax.Array):
            place.array.copy_to_host_async()  # all are on their way before the first is waited for
    memory = segment.map()
    for place in places:
        numbers = np.asarray(place.array)
        room = np.frombuffer(memory, numbers.dtype, numbers.size, place.start).reshape(numbers.shape)
        np.copyto(room, numbers)


def _device_of(array: Any) -> Any:
    """None: the host's memory."""
    if not isinstance(array, jax.Array):
        return None
    (device,) = array.devices()
    return None if device.platform == "cpu" else device


def _has_room(device: Any, size: int) -> bool:
    """Whether it can have a second copy of so many bytes."""
    stats = device.memory_stats() or {}
    most, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    return bool(most - used - size >= _RESERVE * most > 0)
