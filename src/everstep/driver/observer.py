"""Who watches a run: the terminal, the user's callbacks. Watching changes nothing."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from everstep.control import commands as c
from everstep.driver.ledger import RunLedger
from everstep.driver.registry import LiveRun


class Incarnation(NamedTuple):
    """Whose count an index is of: a replica group's, from the start of its workers. Without groups, there is
    one.
    """

    epoch: int
    group: int
    generation: int


class Observer(Protocol):
    """Called on the driver's loop: everything here must be quick."""

    def opened(self, ledger: RunLedger) -> None:
        """The run has begun, or goes on. Its ledger is kept up to date."""
        ...

    def record(self, record: c.Record) -> None:
        """The brain decided or learnt something."""
        ...

    def say(self, line: str) -> None:
        """Something that the user should know."""
        ...

    def output(self, rank: int, text: str) -> None:
        """What a worker printed (only of the ranks in ``log_ranks``)."""
        ...

    def started(self, run: LiveRun) -> None:
        """A worker group is ready; with replica groups, some of it may be new."""
        ...

    def progress(self, rank: int, epoch: int, index: int, newest: list[msgspec.Raw]) -> None:
        """A rank has reported up to ``index``. ``newest``: rank 0's latest metrics."""
        ...

    def reported(self, of: Incarnation, rank: int, index: int, metrics: msgspec.Raw) -> None:
        """One report of one rank, only where a callback looks at them."""
        ...

    def committed(self, of: Incarnation, index: int, address: str) -> None:
        """A checkpoint exists."""
        ...

    def close(self) -> None: ...
