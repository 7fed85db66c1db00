"""How tensors get from a device into the host's memory, and back: a copier for each kind of device."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from everstep.snapshots.copying import Copying
from everstep.snapshots.segments import Segment

CHUNK = 32 << 20
"""Bytes of a segment that are registered with a device at once. It takes no work from training meanwhile."""
BOUNCE = 32 << 20
"""Bytes that go to a device at once."""
TOGETHER = 4
"""Pieces of the size of a chunk that are copied to the host before anything else is."""
_PAGE = 4096
_SHOWS = 0.1
"""How much of the time in which a device copies to the host shows in training: 0.06 to 0.09 of it were
measured on an H200, beside a GPT that is trained.
"""
_ALIGNED = 256
"""Where copies on a device begin: at a multiple of this."""
_RESERVE = 0.1
"""Of a device's memory: what is left for training to grow into."""


class TensorPlace(NamedTuple):
    """A tensor, and where its bytes belong in a segment."""

    tensor: torch.Tensor
    start: int

    @property
    def size(self) -> int:
        return _size(self.tensor)


class Piece(NamedTuple):
    """Bytes on a device, and where they belong in the host's memory."""

    source: torch.Tensor
    target: torch.Tensor


class TensorCopier(Protocol):
    """Of one device. It is used for one snapshot at a time. A tensor always lies in the same place of a
    segment; it may be on another device than before.
    """

    def copy(self, file: str, places: Sequence[TensorPlace], segment: Segment) -> Copying | None:
        """Copy tensors of a file as they are now: they may be changed once it returns. None: all is there."""
        ...

    def bring_back(self, saved: torch.Tensor, *, copy: bool) -> torch.Tensor:
        """What the host's memory has, on the device. Without ``copy`` it may be that memory, to be read."""
        ...

    def all_is_back(self) -> None:
        """Nothing more is brought back for now."""
        ...


class DirectCopier:
    """Copies at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._views: dict[Segment, dict[int, torch.Tensor]] = {}
        """Of each tensor, by where it begins, in the segments that they have been copied to."""

    def copy(self, file: str, places: Sequence[TensorPlace], segment: Segment) -> Copying | None:
        if segment not in self._views:
            self._views[segment] = {}
            segment.before_unmapping(lambda: self._forget(segment))
        views, memory = self._views[segment], None
        for place in places:
            view = views.get(place.start)
            if view is None:
                memory = _bytes_of(segment) if memory is None else memory
                view = views[place.start] = _seen_as(memory, place.start, place.tensor)
            view.copy_(place.tensor)
        return None

    def _forget(self, segment: Segment) -> None:
        del self._views[segment]

    def bring_back(self, saved: torch.Tensor, *, copy: bool) -> torch.Tensor:
        return saved.to(self._device, copy=copy)

    def all_is_back(self) -> None:
        pass


class Side(Protocol):
    """A device that copies beside what it computes, as a ``StagedCopier`` needs it.

    A mark is a moment in what the device has been given to do.
    """

    @property
    def device(self) -> torch.device: ...

    def bounce(self, size: int) -> torch.Tensor:
        """So many bytes of the host's memory that the device reads by itself."""
        ...

    def room(self, size: int) -> torch.Tensor | None:
        """So many bytes of the device's memory; None: training may need them."""
        ...

    def mark(self) -> Any:
        """After what training has given to the device so far."""
        ...

    def copy_out(self, pieces: Sequence[Piece], since: Any) -> Any:
        """Copy to the host beside training, and not before ``since``. Returns a mark after all of them."""
        ...

    def hold(self, until: Any) -> None:
        """What training gives to the device from now on waits for this."""
        ...

    def wait(self, until: Any) -> None: ...

    def between(self, one: Any, other: Any) -> float:
        """Seconds, of marks that have passed."""
        ...

    def register(self, address: int, size: int) -> bool:
        """Let the device read and write this memory of the host by itself. False: it can't."""
        ...

    def unregister(self, address: int) -> None: ...


class StagedCopier:
    """Copies inside the device first, which is quick, and from there to the host while training goes on.
    Where the device has no room for that, what training does next waits until all is at the host.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._stages: dict[str, _Stage | None] = {}
        """Room inside the device for the tensors of each file; None: there is none."""
        self._wanted: dict[str, list[int]] = {}
        """Where the tensors of each file begin that are on this device."""
        self._registered: dict[Segment, list[int]] = {}
        """Addresses of chunks that are registered with the device."""
        self._pieces: dict[Segment, list[Piece]] = {}
        """Of the stage that is copied to a segment: they are always the same."""
        self._bounces: deque[tuple[torch.Tensor, Any]] = deque()
        """What is on its way to the device, the oldest first, and when it is there."""

    def copy(self, file: str, places: Sequence[TensorPlace], segment: Segment) -> Copying | None:
        stage = self._stage(file, places)
        began = self._side.mark()
        if stage is None:
            return self._held(places, segment, began)
        torch._foreach_copy_(stage.views, [place.tensor for place in places])
        return _Staged(self, stage, segment, began, self._side.mark())

    def _stage(self, file: str, places: Sequence[TensorPlace]) -> _Stage | None:
        """Made once: a state keeps its shape, and what training has not left at the first snapshot, it will
        not leave later. Made again when other tensors of it are on this device than before.
        """
        wanted = [place.start for place in places]
        if self._wanted.get(file) != wanted:
            self._wanted[file] = wanted
            self._stages.pop(file, None)  # its room can be taken again
            self._pieces.clear()
            starts, size = _laid_out(places)
            room = self._side.room(size)
            self._stages[file] = None if room is None else _Stage(room, places, starts)
        return self._stages[file]

    def _held(self, places: Sequence[TensorPlace], segment: Segment, began: Any) -> Copying:
        memory = self.registered(segment)
        done = self._side.copy_out(
            [piece for place in places for piece in _pieces(_as_bytes(place.tensor), memory, place.start)],
            began,
        )
        self._side.hold(done)
        return _Held(self._side, [place.tensor for place in places], began, done)

    def bring(self, stage: _Stage, segment: Segment, since: Any) -> Any:
        """From the device to the host, beside training."""
        memory = self.registered(segment)
        if segment not in self._pieces:
            self._pieces[segment] = [
                piece
                for run in stage.runs
                for piece in _pieces(stage.room[run.at : run.at + run.size], memory, run.start)
            ]
        return self._side.copy_out(self._pieces[segment], since)

    def registered(self, segment: Segment) -> torch.Tensor:
        """The bytes of a segment that the device knows of, if it can."""
        memory = _bytes_of(segment)
        if segment not in self._registered:
            known = self._registered[segment] = []
            segment.before_unmapping(lambda: self._forget(segment))
            for start in range(0, memory.numel(), CHUNK):
                chunk = memory[start : start + CHUNK]
                chunk[::_PAGE].sum()  # else the kernel looks for free pages while the device waits
                began = time.monotonic()
                if not self._side.register(chunk.data_ptr(), chunk.numel()):
                    break
                known.append(chunk.data_ptr())
                time.sleep(time.monotonic() - began)  # let training give the device its work
        return memory

    def _forget(self, segment: Segment) -> None:
        self._pieces.pop(segment, None)
        for address in self._registered.pop(segment):
            self._side.unregister(address)

    def bring_back(self, saved: torch.Tensor, *, copy: bool) -> torch.Tensor:
        try:
            found = torch.empty(saved.shape, dtype=saved.dtype, device=self._side.device)
        except torch.OutOfMemoryError:
            if copy:
                raise
            return saved  # loading it copies it into a tensor that has room already
        source, target = _as_bytes(saved), _as_bytes(found)
        for start in range(0, source.numel(), BOUNCE):
            piece = source[start : start + BOUNCE]
            bounce = self._next_bounce()[: piece.numel()]
            bounce.copy_(piece)
            target[start : start + BOUNCE].copy_(bounce, non_blocking=True)
            self._bounces[-1] = (self._bounces[-1][0], self._side.mark())
        return found

    def _next_bounce(self) -> torch.Tensor:
        """The host fills one while the device reads the other."""
        if len(self._bounces) < 2:
            bounce = self._side.bounce(BOUNCE)
        else:
            bounce, there = self._bounces.popleft()
            self._side.wait(there)
        self._bounces.append((bounce, None))
        return bounce

    def all_is_back(self) -> None:
        for _, there in self._bounces:
            self._side.wait(there)
        self._bounces.clear()

    @property
    def side(self) -> Side:
        return self._side


class _Run(NamedTuple):
    """Bytes that lie one after another, in a segment and on the device."""

    start: int
    size: int
    at: int
    """Where they begin on the device."""


class _Stage:
    """Room on the device for the tensors of a file."""

    def __init__(self, room: torch.Tensor, places: Sequence[TensorPlace], starts: Sequence[int]) -> None:
        self.room = room
        self.views = [_seen_as(room, at, place.tensor) for place, at in zip(places, starts, strict=True)]
        """Of each tensor."""
        self.runs = _runs(places, starts)


class _Staged:
    """Tensors that are copied inside the device, and have to be brought to the host."""

    def __init__(
        self, copier: StagedCopier, stage: _Stage, segment: Segment, began: Any, staged: Any
    ) -> None:
        self._copier = copier
        self._stage = stage
        self._segment = segment
        self._began, self._staged = began, staged

    def wait(self) -> float:
        side = self._copier.side
        done = self._copier.bring(self._stage, self._segment, self._staged)
        side.wait(done)
        return side.between(self._began, self._staged) + _SHOWS * side.between(self._staged, done)


class _Held:
    """Tensors that are on their way to the host. Training waits for them."""

    def __init__(self, side: Side, tensors: Sequence[torch.Tensor], began: Any, done: Any) -> None:
        self._side = side
        self._tensors = tensors  # not to be freed meanwhile
        self._began, self._done = began, done

    def wait(self) -> float:
        self._side.wait(self._done)
        self._tensors = ()
        return self._side.between(self._began, self._done)


class CudaSide:
    """A GPU, and two streams of it for copies.

    They copy some pieces each in turn. A stream that has many copies to make keeps the engine until all are
    made, and a training function that reads its loss waits for that: 22 ms more for 4.4 GB, on an H200. Where
    the engine goes from one stream to the other, the loss gets in between: 7 ms.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))

    @property
    def device(self) -> torch.device:
        return self._device

    def bounce(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def room(self, size: int) -> torch.Tensor | None:
        free, total = torch.cuda.mem_get_info(self._device)
        if free - size < _RESERVE * total:
            return None
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def mark(self) -> torch.cuda.Event:
        return self._recorded(torch.cuda.current_stream(self._device))

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def copy_out(self, pieces: Sequence[Piece], since: torch.cuda.Event) -> torch.cuda.Event:
        last = since
        for start, stream in zip(range(0, len(pieces), TOGETHER), itertools.cycle(self._streams)):
            sources, targets = zip(*pieces[start : start + TOGETHER], strict=True)
            with torch.cuda.stream(stream):
                stream.wait_event(last)
                torch._foreach_copy_(targets, sources, non_blocking=True)
                last = self._recorded(stream)
        return last

    def hold(self, until: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(until)

    def wait(self, until: torch.cuda.Event) -> None:
        until.synchronize()

    def between(self, one: torch.cuda.Event, other: torch.cuda.Event) -> float:
        return float(one.elapsed_time(other)) / 1000

    def register(self, address: int, size: int) -> bool:
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)


KINDS: dict[str, Callable[[torch.device], TensorCopier]] = {
    "cuda": lambda device: StagedCopier(CudaSide(device))
}
"""By the type of device. Tensors on others are copied at once."""


class Copiers:
    """Of all devices that a state has tensors on."""

    def __init__(self) -> None:
        self._copiers: dict[torch.device, TensorCopier] = {}

    def copy(
        self, tensors: Mapping[str, torch.Tensor], file: str, segment: Segment, starts: Mapping[str, int]
    ) -> list[Copying]:
        by_device: dict[torch.device, list[TensorPlace]] = {}
        for name, start in starts.items():
            if tensors[name].numel():
                by_device.setdefault(tensors[name].device, []).append(TensorPlace(tensors[name], start))
        under_way = [self._of(device).copy(file, places, segment) for device, places in by_device.items()]
        return [copying for copying in under_way if copying is not None]

    def bring_back(self, saved: torch.Tensor, device: torch.device, *, copy: bool) -> torch.Tensor:
        return self._of(device).bring_back(saved, copy=copy)

    def all_is_back(self) -> None:
        for copier in self._copiers.values():
            copier.all_is_back()

    def _of(self, device: torch.device) -> TensorCopier:
        if device not in self._copiers:
            self._copiers[device] = KINDS.get(device.type, DirectCopier)(device)
        return self._copiers[device]


def _bytes_of(segment: Segment) -> torch.Tensor:
    return torch.frombuffer(segment.map(), dtype=torch.uint8)


def _seen_as(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Room for a tensor like this one."""
    return memory[start : start + _size(like)].view(like.dtype).view(like.shape)


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _laid_out(places: Sequence[TensorPlace]) -> tuple[list[int], int]:
    """Where each tensor is copied to inside the device, and how much room that takes. What is next to each
    other in the segment is so there, too.
    """
    starts: list[int] = []
    end, last = 0, 0
    for place in places:
        if place.start != last:
            end = math.ceil(end / _ALIGNED) * _ALIGNED
        starts.append(end)
        end += place.size
        last = place.start + place.size
    return starts, end


def _runs(places: Sequence[TensorPlace], starts: Sequence[int]) -> list[_Run]:
    found: list[_Run] = []
    for place, at in zip(places, starts, strict=True):
        if found and found[-1].start + found[-1].size == place.start:
            found[-1] = found[-1]._replace(size=found[-1].size + place.size)
        else:
            found.append(_Run(place.start, place.size, at))
    return found


def _pieces(source: torch.Tensor, memory: torch.Tensor, start: int) -> Iterator[Piece]:
    """Of bytes that belong at ``start``."""
    for begin, end in _cut(start, start + source.numel()):
        yield Piece(source[begin - start : end - start], memory[begin:end])


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """A range of a segment, in pieces of which each lies in one chunk: a copy can't go across two."""
    while start < stop:
        end = min(stop, (start // CHUNK + 1) * CHUNK)
        yield start, end
        start = end
