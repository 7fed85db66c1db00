"""Which hosts keep failing."""

from __future__ import annotations

from everstep.deadlines import Deadlines
from everstep.failures import Failure, Kind
from everstep.topology.slices import HostId

_BLAMED = frozenset({Kind.EXIT, Kind.SIGNAL, Kind.HOST_LOST, Kind.HOST_SILENT, Kind.START, Kind.TEMPLATE})
"""A user's exception says nothing about the machine that it was raised on."""


class Suspects:
    """Hosts that keep failing are set aside for a while."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._blamed: dict[HostId, list[float]] = {}
        self._until: dict[HostId, float] = {}

    def suspect(self, cause: Failure, at: float) -> float | None:
        """Blame the host of a failure, if it may be at fault. Returns until when it is set aside, if that
        begins now.
        """
        if cause.host is None or cause.echo or cause.kind not in _BLAMED:
            return None
        return self.blame(cause.host, at)

    def blame(self, host: HostId, at: float) -> float | None:
        """One more failure of this host. Returns until when it is set aside, if that begins now."""
        limits = self._deadlines
        recent = [t for t in self._blamed.get(host, []) if at - t < limits.set_aside_s]
        self._blamed[host] = [*recent, at]
        if len(recent) + 1 < limits.set_aside_after:
            return None
        del self._blamed[host]
        self._until[host] = at + limits.set_aside_s
        return self._until[host]

    def set_aside(self, at: float) -> frozenset[HostId]:
        """The hosts that are left out now."""
        return frozenset(host for host, until in self._until.items() if at < until)
