"""Values that every rank of a group sees change at the same call, as one worker has them.

The driver proposes a new value. Each worker answers at once with how often it has asked so far, and asks no
further until it is told from which call on the value holds: the highest answer plus one. While nothing is
proposed, asking costs a lock.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from everstep.protocol import worker_messages

if TYPE_CHECKING:
    from everstep.preemption import PreemptionInfo

Value = TypeVar("Value")

PATIENCE_S = 30.0
"""How long a call waits for the others' answers. A rank that hasn't answered by then was lost
with its host.
"""


class SynchronizedValue(Generic[Value]):
    def __init__(self, initial: Value) -> None:
        self._value = self._newest = initial
        self._calls = 0
        self._pending: tuple[int, Value] | None = None
        self._scheduled: deque[tuple[int, Value]] = deque()
        self._changed = threading.Condition()

    def propose(self, number: int, value: Value) -> int:
        """A new value is on its way. How many calls there were."""
        with self._changed:
            self._pending = (number, value)
            self._newest = value
            return self._calls

    def agree(self, number: int, start: int) -> None:
        """The value that was proposed under this number holds from call ``start`` on."""
        with self._changed:
            if self._pending is not None and self._pending[0] == number:
                self._scheduled.append((start, self._pending[1]))
                self._withdraw()

    def abandon(self) -> None:
        """The driver that proposed is gone: nobody waits for it."""
        with self._changed:
            self._withdraw()

    def _withdraw(self) -> None:
        self._pending = None
        self._changed.notify_all()

    def ask(self) -> Value:
        with self._changed:
            self._calls += 1
            call = self._calls
            self._changed.wait_for(lambda: self._pending is None, PATIENCE_S)
            while self._scheduled and self._scheduled[0][0] <= call:
                self._value = self._scheduled.popleft()[1]
            return self._value

    @property
    def newest(self) -> Value:
        """The value that was proposed last, whether or not it holds yet."""
        return self._newest


class SharedValues:
    """All that there are, by what they mean."""

    def __init__(self, snapshot_every: int) -> None:
        self.preemption: SynchronizedValue[PreemptionInfo | None] = SynchronizedValue(None)
        self.want_checkpoint = SynchronizedValue("")
        self.state_due = SynchronizedValue(0)
        self.snapshot_every = SynchronizedValue(snapshot_every)

    def proposed(self, number: int, value: worker_messages.AnyValue) -> int:
        """The driver wants all ranks to see this from the same call on. How many calls there were here."""
        match value:
            case worker_messages.WantCheckpoint():
                return self.want_checkpoint.propose(number, value.reason)
            case worker_messages.StateDue():
                return self.state_due.propose(number, value.turn)
            case worker_messages.SnapshotEvery():
                return self.snapshot_every.propose(number, value.reports)
            case worker_messages.Preemption():
                from everstep.preemption import PreemptionInfo

                ranks = value.node_to_ranks
                return self.preemption.propose(
                    number, PreemptionInfo(value.deadline_ms, ranks) if ranks else None
                )

    def agreed(self, number: int, start: int) -> None:
        """What was proposed under this number holds from call ``start`` on."""
        self.want_checkpoint.agree(number, start)
        self.state_due.agree(number, start)
        self.snapshot_every.agree(number, start)
        self.preemption.agree(number, start)

    def abandon(self) -> None:
        """The driver is gone, and with it what it had proposed."""
        self.want_checkpoint.abandon()
        self.state_due.abandon()
        self.snapshot_every.abandon()
        self.preemption.abandon()
