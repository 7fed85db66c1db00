"""Which training function runs in this process. Imports nothing: data sets ask it, also without a run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.context import TrainContext

_context: TrainContext | None = None
_pid = 0


def enter_context(context: TrainContext | None) -> None:
    """Make this the process's own."""
    global _context, _pid
    _context, _pid = context, os.getpid()


def context_here() -> TrainContext | None:
    """Of the training function that runs here, if one does. Not in a process that it has forked."""
    return _context if _pid == os.getpid() else None
