"""The messages of workers: frames out of bytes, and how far each worker's have been dealt with.

An agent keeps a worker's messages until the driver acknowledges them, so that a later driver receives those
that this one did not live to deal with. A frame may be acknowledged once nothing depends on receiving it
again: a report once it is in the journal and its checkpoint is committed or given up, a question once it is
answered. A worker's last message is never acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from everstep.protocol import framing, worker_messages
from everstep.topology.placement import Assignment

_MOST_SETTLED = 64
"""More than a rank may be ahead of others with checkpoints that are neither committed nor given up."""


class Summary(msgspec.Struct):
    """All that a later driver needs to know of what was acknowledged."""

    joined: bool = False
    upto: int = 0
    turn: int = 0
    taking: int = 0
    """The report whose snapshot was being taken, or 0."""
    settled: tuple[int, ...] = ()
    """The last reports that brought something for a checkpoint. It is committed or given up since."""


@dataclass
class _Open:
    """A frame that a later driver must receive if this one dies now."""

    offset: int
    summary: Summary
    index: int = 0
    """The report whose checkpoint is awaited, or 0."""
    seq: int = 0
    """The question that is to be answered, or 0."""


class WorkerStream:
    """One worker's messages."""

    def __init__(self, assignment: Assignment, generation: int, offset: int = 0, state: bytes = b"") -> None:
        self.assignment = assignment
        self.generation = generation
        self._known = msgspec.msgpack.decode(state, type=Summary) if state else Summary()
        """But for what is settled, which is known of what was acknowledged only."""
        self.settled = deque(self._known.settled, maxlen=_MOST_SETTLED)
        """The last reports whose checkpoint is committed or given up."""
        self.returned = False
        self.failed = False
        self.stopped = False
        """Told to end, or its host counts as lost."""
        self.behind = False
        """What comes of it may still be what it has reported before this driver ran."""
        self.bound: set[int] = set()
        """Reports whose part only its process can bring, and has not brought yet."""
        self._frames = framing.Frames()
        self._offset = offset
        """Where the next frame begins."""
        self._acknowledged = offset
        self._open: deque[_Open] = deque()

    @property
    def joined(self) -> bool:
        return self._known.joined

    @property
    def upto(self) -> int:
        """The last report."""
        return self._known.upto

    @property
    def turn(self) -> int:
        return self._known.turn

    @property
    def taking(self) -> int:
        """The report whose snapshot is being taken, or 0."""
        return self._known.taking

    def feed(self, data: bytes) -> Iterator[worker_messages.AnyFromWorker]:
        """The messages that are complete now. Each is accounted for before the next is given."""
        for body in self._frames.feed(data):
            message = worker_messages.from_worker.decode(body)
            match message:
                case worker_messages.Report():  # there are far more of these than of all else
                    if message.part is not None or message.owed:
                        self._keep(index=message.index)
                    self._known.upto = message.index
                    if message.bound:
                        self.bound.add(message.index)
                    if message.taking:
                        self._known.taking = message.index
                case worker_messages.SnapshotTaken() if message.index == self.taking:
                    self._known.taking = 0
                case worker_messages.PartDone():
                    self.bound.discard(message.part.index)
                case worker_messages.PartFailed():
                    self.bound.discard(message.index)
                case worker_messages.Joined():
                    self._known.joined = True
                case worker_messages.Question():
                    self._keep(seq=message.seq)
                    if message.turn:
                        self._known.turn = message.turn
                case worker_messages.Returned() | worker_messages.Raised():
                    self._keep()
                case _:
                    pass
            self._offset += 4 + len(body)
            yield message

    def _keep(self, index: int = 0, seq: int = 0) -> None:
        """Keep open the frame that begins here: what it leads to isn't done yet."""
        self._open.append(_Open(self._offset, self._summary(), index, seq))

    def _summary(self) -> Summary:
        return msgspec.structs.replace(self._known, settled=())

    @property
    def has_news(self) -> bool:
        """Whether there is anything that was not acknowledged."""
        return bool(self._open) or self._offset > self._acknowledged

    def settle(self, committing: set[int], unanswered: set[int]) -> None:
        """Forget what a later driver need not receive: checkpoints that nobody waits for any more, questions
        that are answered.
        """
        while self._open:
            first = self._open[0]
            if first.index:
                waits = first.index in committing
            else:
                waits = first.seq in unanswered if first.seq else True
            if waits:
                break
            self._open.popleft()
            if first.index:
                self.settled.append(first.index)

    def acknowledgement(self) -> tuple[int, bytes] | None:
        """(offset, state) up to which everything is dealt with, if that has moved."""
        if self._open:
            offset, summary = self._open[0].offset, self._open[0].summary
        else:
            offset, summary = self._offset, self._summary()
        if offset <= self._acknowledged:
            return None
        self._acknowledged = offset
        summary = msgspec.structs.replace(summary, settled=tuple(self.settled))
        return offset, msgspec.msgpack.encode(summary)
