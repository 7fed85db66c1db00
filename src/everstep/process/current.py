"""The session of this process: which training function runs here, if one does.

Imports next to nothing: data sets ask, also without a run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from everstep.process import step_times

if TYPE_CHECKING:
    from everstep.context import TrainContext
    from everstep.worker.session import Session

_session: Session | None = None
_is_forked = False
"""This process has been forked from the one whose session that is."""


def enter(session: Session | None) -> None:
    """Make this the process's session."""
    global _session, _is_forked
    _session, _is_forked = session, False
    if session is not None:
        step_times.use(session.times)


def session_here() -> Session | None:
    """Not in a process that a training function has forked."""
    return None if _is_forked else _session


def _forked() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_forked)  # a call to ask for the process's number costs much more


def context_here() -> TrainContext | None:
    session = session_here()
    return session.context if session is not None else None


def current(what: str) -> Session:
    """This process's session, or an error that says where ``what`` may be called."""
    session = session_here()
    if session is None:
        from everstep.errors import CallError

        raise CallError(
            f"{what}() works inside a training function only",
            "call it in what you give to a Trainer"
            + (", not in a process that it forked (a data loader's worker)" if _session is not None else ""),
        )
    return session
