"""torchft's lighthouse, as the agent of a host has it."""

from __future__ import annotations

from collections.abc import Callable

from everstep.protocol import wire
from everstep.torchft.forwarder import Forwarder
from everstep.torchft.process import LighthouseProcess


class HostLighthouse:
    """torchft's lighthouse, if this host has it, and where workers of this host reach it."""

    def __init__(self, send: Callable[[wire.LighthouseUp], None]) -> None:
        self._send = send
        self._lighthouse: LighthouseProcess | None = None
        self._forwarder: Forwarder | None = None

    @property
    def where(self) -> str:
        return self._lighthouse.where if self._lighthouse is not None else ""

    @property
    def pid(self) -> int:
        return self._lighthouse.pid if self._lighthouse is not None else 0

    @property
    def forwarded(self) -> str:
        """The address for this host's workers."""
        return f"http://{self._forwarder.address}" if self._forwarder is not None else ""

    def run(self, message: wire.RunLighthouse) -> None:
        self.stop()
        self._lighthouse = LighthouseProcess(message.address, message.options, self._is_up)

    def _is_up(self, address: str) -> None:
        if self._forwarder is not None:
            self._forwarder.point_at(address)  # the other hosts' need a driver, which may be away
        self._send(wire.LighthouseUp(address))

    def forward(self, address: str) -> None:
        self._forwarder = self._forwarder or Forwarder()
        self._forwarder.point_at(address)

    def reaped(self, pid: int) -> bool:
        """A child of ours has ended. True if it was the lighthouse."""
        if self._lighthouse is None or pid != self._lighthouse.pid:
            return False
        self._lighthouse.died()
        return True

    def stop(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.stop()
            self._lighthouse = None

    def leave(self) -> None:
        """The run has left this host."""
        self.stop()
        if self._forwarder is not None:
            self._forwarder.close()
            self._forwarder = None
