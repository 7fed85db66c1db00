"""Who watches a run: the terminal, the user's callbacks. Watching changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec

from everstep.control import commands as c
from everstep.identity import Incarnation
from everstep.journal.ledger import RunLedger
from everstep.observe.registry import LiveRun


class NewReports(NamedTuple):
    """Beside how far a rank has come."""

    metrics: msgspec.Raw | None = None
    """Of the newest, if that is the run's."""
    earlier: int = 0
    """The last that was made before this driver ran; 0: none was."""


class Observer(Protocol):
    """Called on the driver's loop: everything here must be quick."""

    def opened(self, ledger: RunLedger) -> None:
        """The run has begun, or goes on. Its ledger is kept up to date."""
        ...

    def record(self, record: c.Record) -> None:
        """The controller decided or learnt something."""
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

    def progress(self, rank: int, epoch: int, index: int, newest: NewReports) -> None:
        """A rank has reported up to ``index``. ``newest``: what this adds to the run's metrics; nothing,
        unless the rank leads the group whose metrics those are.
        """
        ...

    def reported(self, of: Incarnation, rank: int, index: int, metrics: msgspec.Raw, saves: bool) -> None:
        """One report of one rank, only where a callback looks at them. ``saves``: a checkpoint comes
        with it.
        """
        ...

    def committed(self, of: Incarnation, index: int, address: str) -> None:
        """A checkpoint exists."""
        ...

    def unsaved(self, of: Incarnation, index: int) -> None:
        """A report's checkpoint will never exist."""
        ...

    def close(self) -> None: ...


class Display(Observer, Protocol):
    """The terminal: it also shows what earlier drivers did, and how the run ends."""

    def resumed(self, reports: Mapping[int, int]) -> None:
        """How many reports earlier drivers have recorded, by attempt. Called first, if at all."""
        ...

    def ended(self, how: str) -> None:
        """``how``: one word. Called last, if it is known."""
        ...
