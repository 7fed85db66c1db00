"""Where torchft's lighthouse is, and which hosts know.

It lives on one of the run's hosts, since agents outlive the driver; there its agent restarts it when it dies.
When that host is lost or given back, it moves to another, and only the forwarders have to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from everstep.protocol import wire
from everstep.topology.slices import HostId
from everstep.torchft.server import NeedsLighthouse


class LighthousePlacement:
    def __init__(
        self,
        options: Mapping[str, int],
        lease: int,
        send: Callable[[HostId, wire.AnyToAgent], None],
        address_of: Callable[[HostId], str],
    ) -> None:
        self.host: HostId | None = None
        self._options = dict(options)
        self._lease = lease
        self._send = send
        self._address_of = address_of
        self._where = ""
        self._sent: dict[HostId, str] = {}

    def found(self, host: HostId, where: str) -> None:
        """An earlier driver's agent has it."""
        self.host, self._where = host, where

    def place(self, hosts: Sequence[HostId]) -> None:
        """The run's hosts now, the best for it first. It is on one of them; all know where."""
        self._sent = {host: self._sent[host] for host in hosts if host in self._sent}
        if self.host not in hosts:
            self.host, self._where = None, ""
            if hosts:
                self.host = hosts[0]
                self._run(self.host)
        for host in hosts:
            if self._sent.get(host) != self._where:
                self._sent[host] = self._where
                self._send(host, wire.Forward(self._lease, self._where))

    def renew(self) -> None:
        """All workers start anew: the dead of before must not be asked for in the first quorum."""
        if self.host is not None:
            self._where = ""
            self._run(self.host)

    def _run(self, host: HostId) -> None:
        self._send(host, wire.RunLighthouse(self._lease, self._address_of(host), self._options))

    def up(self, host: HostId, where: str) -> None:
        if host == self.host:
            self._where = where
            self.place(list(self._sent))


def lighthouse_for(
    backend: object,
    lease: int,
    send: Callable[[HostId, wire.AnyToAgent], None],
    address_of: Callable[[HostId], str],
) -> LighthousePlacement | None:
    """None: this backend's workers need none."""
    if not isinstance(backend, NeedsLighthouse):
        return None
    return LighthousePlacement(backend.lighthouse(), lease, send, address_of)
