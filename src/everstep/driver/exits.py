"""How a worker's process ended, in words and as a failure."""

from __future__ import annotations

from everstep.backend.base import Backend
from everstep.errors import signal_name
from everstep.failures import Failure, Kind
from everstep.process.sizes import in_units
from everstep.protocol import wire
from everstep.topology.slices import HostId


def failure_of(exited: wire.Exited, host: HostId, at: float, backend: Backend) -> Failure:
    """What a process that nobody ended, and that had not returned, died of; when, by the driver's clock."""
    return Failure(
        _kind_of(exited),
        at,
        _how_it_ended(exited),
        rank=exited.rank,
        host=host,
        echo=exited.signal is not None and backend.is_peer_abort(exited.signal, exited.log_tail),
        exit_code=exited.code,
        signal=signal_name(exited.signal) if exited.signal else None,
        log_tail=exited.log_tail,
        log_path=exited.log_path,
    )


def _kind_of(exited: wire.Exited) -> Kind:
    if exited.oom:
        return Kind.OOM
    return Kind.SIGNAL if exited.signal else Kind.EXIT


def _how_it_ended(exited: wire.Exited) -> str:
    memory = f"peak memory {in_units(exited.peak_rss)}"
    if exited.oom:
        return f"out of memory (killed by the OOM killer; {memory})"
    if exited.signal:
        return f"killed by {signal_name(exited.signal)} ({memory})"
    if exited.code == 0:
        return "exited with code 0 before the training function returned"
    return f"exited with code {exited.code}"
