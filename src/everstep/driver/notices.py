"""Which hosts will be taken away, as every rank is to know it (``get_preemption_info``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from everstep.driver.streams import WorkerStream
from everstep.process.clock import Clock
from everstep.protocol import worker_messages
from everstep.topology.slices import HostId


class NoticesToWorkers:
    def __init__(self, propose: Callable[[worker_messages.AnyValue], None], clock: Clock) -> None:
        self._propose = propose
        self._clock = clock
        self._deadlines: dict[HostId, float] = {}

    def set(self, host: HostId, deadline: float | None) -> None:
        """None: it was taken back."""
        if deadline is None:
            self._deadlines.pop(host, None)
        else:
            self._deadlines[host] = deadline

    def forget(self, hosts: Collection[HostId]) -> None:
        self._deadlines = {host: at for host, at in self._deadlines.items() if host not in hosts}

    def concern(self, streams: Iterable[WorkerStream]) -> bool:
        return any(stream.assignment.host in self._deadlines for stream in streams)

    def propose(self, streams: Collection[WorkerStream]) -> None:
        """Let every rank know which hosts go; a notice for one host of a slice means all of it."""
        slices = {s.assignment.slice for s in streams if s.assignment.host in self._deadlines}
        ranks: dict[HostId, list[int]] = {}
        for stream in streams:
            if stream.assignment.slice in slices:
                ranks.setdefault(stream.assignment.host, []).append(stream.assignment.rank)
        # Also hosts are noticed, or were, that none of them is on.
        first = min((self._deadlines[host] for host in ranks if host in self._deadlines), default=None)
        at = None if first is None else int((first - self._clock.now() + self._clock.wall()) * 1000)
        self._propose(worker_messages.Preemption(at, ranks))
