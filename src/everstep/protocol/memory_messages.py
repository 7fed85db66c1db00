"""Messages between a worker and its agent about memory for snapshots."""

from __future__ import annotations

import msgspec

from everstep.saved.snapshots import At


class MemoryRequest(msgspec.Struct, frozen=True, tag=True):
    """One packet each, on a socket of their own. The answer comes with descriptors."""


class NewSlots(MemoryRequest, frozen=True):
    """Room for so many snapshots, or for none: files of these sizes."""

    sizes: dict[str, int]
    count: int
    needed: bool = False
    """Without them nothing can be saved: they are given in any case."""


class OldSlots(MemoryRequest, frozen=True):
    """What is there of this rank's, from before."""


class FindSlot(MemoryRequest, frozen=True):
    """What this rank had at this report, and these of its files, wherever they are. The answer may take a
    while.
    """

    rank: int
    at: At
    files: list[str]


class DropSlot(MemoryRequest, frozen=True):
    """This one isn't needed any more."""

    number: int


class StoreSlot(MemoryRequest, frozen=True):
    """Write this one to storage: ``Stored`` once that is over. It comes with a descriptor of a file that has
    the ``Share``: of which rank, and of which checkpoint.
    """

    number: int
    held: bool
    """The worker waits for its commit."""


class MemoryAnswer(msgspec.Struct, frozen=True, tag=True):
    pass


class Stored(MemoryAnswer, frozen=True):
    """Nobody reads this slot any more."""

    number: int


class Slots(MemoryAnswer, frozen=True):
    """(number, names of its files). With each come a descriptor of its notes and one of each file, in the
    order of the names.
    """

    slots: list[tuple[int, list[str]]]
    storing: list[int] = []
    """Those of them that are being written to storage."""
    refused: str = ""
    """Why there is none."""


AnyRequest = NewSlots | OldSlots | FindSlot | DropSlot | StoreSlot

memory_request = msgspec.msgpack.Decoder(AnyRequest)
memory_answer = msgspec.msgpack.Decoder(Slots | Stored)
