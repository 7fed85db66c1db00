"""Small collectives of the control plane, for every rank and any backend. Not for tensors.

With replica groups they are a group's own: what one group does, no other waits for.
"""

from __future__ import annotations

from typing import TypeVar

import cloudpickle

from everstep.errors import TooLargeError
from everstep.process.current import current
from everstep.protocol import framing

T = TypeVar("T")


def barrier() -> None:
    """Wait until every worker of the group has called this as often as this one."""
    current("collective.barrier").ask("barrier")


def broadcast_from_rank_zero(data: T) -> T:
    """Rank 0's ``data`` (small: a dict, a path), on every worker. A barrier, too."""
    session = current("collective.broadcast_from_rank_zero")
    body = cloudpickle.dumps(data) if session.spec.member.group_rank == 0 else b""
    if len(body) > framing.MAX_PAYLOAD:
        raise TooLargeError(
            f"broadcast_from_rank_zero() of a {type(data).__name__} of {framing.as_size(len(body))}: at most "
            f"{framing.as_size(framing.MAX_PAYLOAD)} can be sent",
            "write it to storage and broadcast its path, or use the framework's own collectives",
        )
    value: T = cloudpickle.loads(session.ask("broadcast", body))
    return value
