"""Snapshots of this host's workers, in memory that the agent owns: they outlive workers, and go with the run.

A worker asks for room over a socket of its own, and gets descriptors. What it writes there, the agent can
read: which snapshots are whole is in their notes.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import msgspec

from everstep.process import kernel
from everstep.process.sizes import in_units
from everstep.protocol import memory_messages
from everstep.saved.snapshots import At, Copy
from everstep.snapshots.segments import FileContent, Label, Segment, Slot
from everstep.storage.checkpoints import Share

_RESERVE = 0.1
"""Of a host's memory: what is never given away."""


PACKETS = socket.SOCK_SEQPACKET if kernel.HAS_DEATH_SIGNALS else socket.SOCK_DGRAM


class Memory:
    """By rank. Used from the agent's main thread only."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, Slot]] = {}
        self._readers: Counter[Slot] = Counter()
        """How often each is being read: those are closed after that."""
        self._last_number = 0
        self._copies: dict[tuple[int, At], Slot] = {}
        """Of ranks that aren't here. Files that are the same in a slot that is here are not in them."""

    def copies(self) -> list[Copy]:
        """What is whole here."""
        whole = [(rank, label) for rank, slot in self._held() if (label := self._whole(slot)) is not None]
        return [Copy(rank, "", la.epoch, la.index, la.ranks) for rank, la in whole]

    def _held(self) -> Iterator[tuple[int, Slot]]:
        for rank, slots in self._slots.items():
            yield from ((rank, slot) for slot in slots.values())
        yield from ((rank, slot) for (rank, _), slot in self._copies.items())

    def _whole(self, slot: Slot) -> Label | None:
        """Which snapshot it holds, if all of its files are here."""
        record = slot.record
        if record is None or not record.is_sound:
            return None
        at, files = record.label.at, record.contents.items()
        return record.label if all(self.same(slot, at, name, c) for name, c in files) else None

    def find(self, rank: int, at: At) -> Slot | None:
        """What a rank had then."""
        for other, slot in self._held():
            if other == rank and slot.label is not None and slot.label.at == at:
                return slot
        return None

    def same(self, slot: Slot, at: At, name: str, content: FileContent) -> Slot | None:
        """A slot that has a file of this content, of the same report: this one, or another."""
        if name in slot.files:
            return slot
        for _, other in self._held():
            record = other.record if name in other.files else None
            if record is not None and (record.label.at, record.contents.get(name)) == (at, content):
                return other
        return None

    def add_copy(self, rank: int, at: At, slot: Slot) -> None:
        if (rank, at) in self._copies:
            self._close(self._copies[rank, at])
        self._copies[rank, at] = slot

    def retain(self, ranks: Collection[int], kept: Collection[At]) -> None:
        """Other ranks than these are not here any more: of those, only these snapshots are needed."""
        for rank in [rank for rank in self._slots if rank not in ranks]:
            for number, slot in [*self._slots[rank].items()]:
                label = slot.label
                if label is not None and label.at in kept:
                    self.add_copy(rank, label.at, self._slots[rank].pop(number))
                else:
                    self.drop(rank, number)
        self.keep_copies(kept)

    def keep_copies(self, kept: Collection[At]) -> None:
        for key in [key for key in self._copies if key[1] not in kept]:
            self._close(self._copies.pop(key))

    def clear(self) -> None:
        """The run has left this host."""
        self.retain((), ())

    def of(self, rank: int) -> dict[int, Slot]:
        return self._slots.get(rank, {})

    @property
    def size(self) -> int:
        """Bytes that have been given away."""
        return sum(slot.size for _, slot in self._held())

    def promised(self) -> int:
        """Bytes that have been given away and not been written to yet."""
        return sum(slot.size - slot.used for _, slot in self._held())

    def make(self, rank: int, sizes: dict[str, int]) -> int:
        """A new slot. Returns its number."""
        self._last_number += 1
        self._slots.setdefault(rank, {})[self._last_number] = Slot.create(f"rank-{rank}", sizes)
        return self._last_number

    def drop(self, rank: int, number: int) -> None:
        slot = self._slots.get(rank, {}).pop(number, None)
        if slot is not None:
            self._close(slot)

    def _close(self, slot: Slot) -> None:
        if not self._readers[slot]:
            slot.close()

    def read(self, rank: int, number: int) -> Slot | None:
        """A slot that stays as it is until ``release``; None: it isn't here."""
        slot = self.of(rank).get(number)
        if slot is not None:
            self._readers[slot] += 1
        return slot

    def release(self, slot: Slot) -> None:
        self._readers[slot] -= 1
        if not any(held is slot for _, held in self._held()):
            self._close(slot)

    def is_read(self, slot: Slot) -> bool:
        return self._readers[slot] > 0


class Finder(Protocol):
    """Looks for snapshots here and on other hosts."""

    def find(self, rank: int, at: At, files: list[str], answer: Callable[[Slot | None, str], None]) -> None:
        """Answer with what a rank had then, and these of its files; or with why it can't be had."""
        ...

    def restored(self) -> None:
        """A worker here has what it asked for."""
        ...


class MemoryLine:
    """A worker's requests for memory. ``fraction``: of the host's memory, for all snapshots. ``store`` is
    called with the number of a slot that is to be written to storage.
    """

    def __init__(
        self,
        rank: int,
        sock: socket.socket,
        memory: Memory,
        fraction: float,
        store: Callable[[int, Share, bool], None],
        peers: Finder,
    ) -> None:
        self._rank = rank
        self._sock = sock
        self._memory = memory
        self._fraction = fraction
        self._store = store
        self._peers = peers
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock, self._read)

    def _read(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if packet:
            self._requested(memory_messages.memory_request.decode(packet), list(fds))
        else:
            asyncio.get_running_loop().remove_reader(self._sock)

    def _requested(self, request: memory_messages.AnyRequest, fds: list[int]) -> None:
        match request:
            case memory_messages.NewSlots():
                self._peers.restored()
                self._answer(*self._new(request))
            case memory_messages.OldSlots():
                self._answer(sorted(self._memory.of(self._rank)))
            case memory_messages.FindSlot():
                self._peers.find(request.rank, request.at, request.files, self._found)
            case memory_messages.DropSlot():
                self._memory.drop(self._rank, request.number)
            case memory_messages.StoreSlot():
                sent = Segment(fds[0])
                share = msgspec.msgpack.decode(sent.map(), type=Share)
                sent.close()
                self._store(request.number, share, request.held)

    def _new(self, request: memory_messages.NewSlots) -> tuple[list[int], str]:
        """The numbers of new slots, or why there are none."""
        size = request.count * sum(request.sizes.values())
        refused = "" if request.needed else shortage(size, self._memory, self._fraction)
        made: list[int] = []
        try:
            for _ in range(0 if refused else request.count):
                made.append(self._memory.make(self._rank, request.sizes))
        except OSError as error:  # a limit of this process: of its files, or of their size
            for number in made:
                self._memory.drop(self._rank, number)
            return [], f"{in_units(size)} needed, and the host's agent can't have it: {error}"
        return made, refused

    def _answer(self, numbers: list[int], refused: str = "") -> None:
        mine = self._memory.of(self._rank)
        storing = [number for number in numbers if self._memory.is_read(mine[number])]
        body = memory_messages.Slots(
            [(number, sorted(mine[number].files)) for number in numbers], storing, refused
        )
        self._send(body, [fd for number in numbers for fd in mine[number].fds])

    def _found(self, slot: Slot | None, why_not: str) -> None:
        if slot is None:
            self._send(memory_messages.Slots([], [], why_not), [])
        else:
            self._send(memory_messages.Slots([(0, sorted(slot.files))]), slot.fds)

    def stored(self, number: int) -> None:
        """It has been written to storage, or can't be."""
        self._send(memory_messages.Stored(number), [])

    def _send(self, body: memory_messages.MemoryAnswer, fds: list[int]) -> None:
        try:
            socket.send_fds(self._sock, [msgspec.msgpack.encode(body)], fds)
        except OSError:
            pass  # it is gone: its exit is handled elsewhere

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()


def shortage(size: int, memory: Memory, fraction: float) -> str:
    """Why there isn't this much memory to be had for snapshots; empty: there is."""
    available, total = kernel.memory()
    available -= memory.promised()
    most, used = int(fraction * total), memory.size
    if used + size > most:
        return (
            f"{in_units(size)} needed, and snapshots may have {in_units(most)} ({fraction:.0%} of the host's "
            f"{in_units(total)}), of which {in_units(used)} are in use"
        )
    if available - size < _RESERVE * total:
        return f"{in_units(size)} needed, and {in_units(available)} of the host's {in_units(total)} are free"
    return ""


class WorkersMemory:
    """The worker's end of a ``MemoryLine``: where its slots come from, and who writes them to storage."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._storing: Counter[int] = Counter()
        self._fds: list[int] = []
        """What came with the last message."""
        self.refused = ""
        """Why there is no more of it."""

    def old_slots(self) -> list[tuple[int, Slot]]:
        return self._request(memory_messages.OldSlots())

    def new_slots(self, sizes: dict[str, int], count: int, *, needed: bool) -> list[tuple[int, Slot]]:
        return self._request(memory_messages.NewSlots(sizes, count, needed))

    def find(self, at: At, rank: int, files: Sequence[str]) -> Slot | None:
        found = self._request(memory_messages.FindSlot(rank, at, list(files)))
        return found[0][1] if found else None

    def drop(self, number: int) -> None:
        self._sock.send(msgspec.msgpack.encode(memory_messages.DropSlot(number)))

    def store(self, number: int, share: Share, *, held: bool) -> None:
        text = msgspec.msgpack.encode(share)
        request = Segment.create("share", len(text))
        request.map()[:] = text
        socket.send_fds(
            self._sock, [msgspec.msgpack.encode(memory_messages.StoreSlot(number, held))], [request.fd]
        )
        request.close()
        self._storing[number] += 1

    def storing(self) -> Collection[int]:
        while self._storing and self._has_message():
            self._receive()
        return self._storing.keys()

    def _has_message(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self) -> None:
        if self._storing:
            self._receive()

    def _receive(self) -> memory_messages.Slots | memory_messages.Stored:
        """The agent's next message."""
        packet, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 250)
        self._fds = list(fds)
        answer: memory_messages.Slots | memory_messages.Stored = memory_messages.memory_answer.decode(packet)
        if isinstance(answer, memory_messages.Stored):
            self._storing[answer.number] -= 1
            self._storing = +self._storing
        return answer

    def _request(self, request: memory_messages.MemoryRequest) -> list[tuple[int, Slot]]:
        self._sock.send(msgspec.msgpack.encode(request))
        answer = self._receive()
        while not isinstance(answer, memory_messages.Slots):
            answer = self._receive()
        self.refused = answer.refused
        self._storing.update(answer.storing)
        found = []
        for number, names in answer.slots:
            own, self._fds = self._fds[: 1 + len(names)], self._fds[1 + len(names) :]
            for fd in own:
                os.set_inheritable(fd, False)
            found.append((number, Slot.of(names, own)))
        return found
