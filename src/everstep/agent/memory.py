"""Snapshots of this host's workers, in memory that the agent owns: they outlive workers, and go with the run.

A worker asks for room over a socket of its own, and gets descriptors. What it writes there, the agent can
read: which snapshots are whole is in their notes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection

import msgspec

from everstep.agent import kernel, wire
from everstep.control.snapshots import Copy
from everstep.snapshots.segments import Slot

_RESERVE = 0.1
"""Of a host's memory: what is never given away."""


PACKETS = socket.SOCK_SEQPACKET if kernel.HAS_DEATH_SIGNALS else socket.SOCK_DGRAM


class Memory:
    """By rank. Used from the agent's main thread only."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, Slot]] = {}
        self._last_number = 0

    def copies(self) -> list[Copy]:
        """What is whole here."""
        labels = [(rank, slot.label) for rank, slots in self._slots.items() for slot in slots.values()]
        return [Copy(rank, "", label.epoch, label.index) for rank, label in labels if label is not None]

    def retain(self, ranks: Collection[int]) -> None:
        """Other ranks than these are not here any more."""
        for rank in [rank for rank in self._slots if rank not in ranks]:
            self._drop(rank)

    def clear(self) -> None:
        """The run has left this host."""
        self.retain(())

    def _drop(self, rank: int) -> None:
        for slot in self._slots.pop(rank).values():
            slot.close()

    def of(self, rank: int) -> dict[int, Slot]:
        return self._slots.get(rank, {})

    @property
    def size(self) -> int:
        """Bytes that have been given away."""
        return sum(slot.size for some in self._slots.values() for slot in some.values())

    def promised(self) -> int:
        """Bytes that have been given away and not been written to yet."""
        slots = (slot for some in self._slots.values() for slot in some.values())
        return sum(slot.size - slot.used for slot in slots)

    def make(self, rank: int, sizes: dict[str, int]) -> int:
        """A new slot. Returns its number."""
        self._last_number += 1
        self._slots.setdefault(rank, {})[self._last_number] = Slot.create(f"rank-{rank}", sizes)
        return self._last_number

    def drop(self, rank: int, number: int) -> None:
        slot = self._slots.get(rank, {}).pop(number, None)
        if slot is not None:
            slot.close()


class MemoryLine:
    """A worker's requests for memory. ``fraction``: of the host's memory, for all snapshots."""

    def __init__(self, rank: int, sock: socket.socket, memory: Memory, fraction: float) -> None:
        self._rank = rank
        self._sock = sock
        self._memory = memory
        self._fraction = fraction
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock, self._read)

    def _read(self) -> None:
        try:
            packet = self._sock.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if not packet:
            asyncio.get_running_loop().remove_reader(self._sock)
            return
        match wire.memory_request.decode(packet):
            case wire.NewSlots() as request:
                size = request.count * sum(request.sizes.values())
                refused = shortage(size, self._memory, self._fraction)
                count = 0 if refused else request.count
                self._answer([self._memory.make(self._rank, request.sizes) for _ in range(count)], refused)
            case wire.OldSlots():
                self._answer(sorted(self._memory.of(self._rank)))
            case wire.DropSlot() as request:
                self._memory.drop(self._rank, request.number)

    def _answer(self, numbers: list[int], refused: str = "") -> None:
        mine = self._memory.of(self._rank)
        body = wire.Slots([(number, sorted(mine[number].files)) for number in numbers], refused)
        fds = [fd for number in numbers for fd in mine[number].fds]
        try:
            socket.send_fds(self._sock, [msgspec.msgpack.encode(body)], fds)
        except OSError:
            pass  # it is gone, and the kernel tells of that elsewhere

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
            f"{_gib(size)} needed, and snapshots may have {_gib(most)} ({fraction:.0%} of the host's "
            f"{_gib(total)}), of which {_gib(used)} are in use"
        )
    if available - size < _RESERVE * total:
        return f"{_gib(size)} needed, and {_gib(available)} of the host's {_gib(total)} are free"
    return ""


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


class WorkersMemory:
    """The same, as a worker has it: where its slots come from."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.refused = ""
        """Why there is no more of it."""

    def old_slots(self) -> list[tuple[int, Slot]]:
        return self._ask(wire.OldSlots())

    def new_slots(self, sizes: dict[str, int], count: int) -> list[tuple[int, Slot]]:
        return self._ask(wire.NewSlots(sizes, count))

    def drop(self, number: int) -> None:
        self._sock.send(msgspec.msgpack.encode(wire.DropSlot(number)))

    def _ask(self, request: wire.MemoryRequest) -> list[tuple[int, Slot]]:
        self._sock.send(msgspec.msgpack.encode(request))
        packet, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 250)
        answer = wire.slots.decode(packet)
        self.refused = answer.refused
        found = []
        for number, names in answer.slots:
            own, fds = fds[: 1 + len(names)], fds[1 + len(names) :]
            for fd in own:
                os.set_inheritable(fd, False)
            found.append((number, Slot.of(names, own)))
        return found
