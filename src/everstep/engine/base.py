"""What the driver needs of an engine: hosts, and a way to talk to the agents on them.

Engines differ only in how hosts are had, and how their loss is learnt. What happens on a host is the agent's,
and the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.deadlines import Deadlines
from everstep.failures import Failure
from everstep.protocol import wire
from everstep.protocol.peer_messages import PeerAddress
from everstep.protocol.script import Script
from everstep.topology.slices import HostId, HostView, SliceName
from everstep.topology.wanted import Wanted


@dataclass(frozen=True)
class EngineRequest:
    """Which run wants hosts, and which."""

    run: str
    lease: int
    resources: dict[str, float]
    """What a worker needs, where the user said so."""
    gpus: int
    workers: int
    deadlines: Deadlines
    wanted: Wanted
    """What a worker needs of a cluster's hosts: resources with defaults, labels, and the shape of a slice."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """What the user wants of the workers' environment, for engines that can make one."""
    journal: str = ""
    """The id of the run's journal, which leases are numbered in. After it was removed, it is another one."""
    left: frozenset[HostId] = frozenset()
    """Hosts on which an earlier driver may have left workers: an answer of their agents is worth a wait."""

    @property
    def holder(self) -> str:
        """What agents are held by: a run, as long as its journal lasts."""
        return f"{self.run}#{self.journal}"


@dataclass(frozen=True)
class SideTask:
    """Work beside training, for a process of its own."""

    code: bytes
    """Pickled: an object with a method ``run`` that returns bytes."""
    script: Script
    """Whose arguments and logging it has."""
    environment: dict[str, str]
    folder: str
    """To work in."""
    log: str
    """Where its output goes on the driver's machine."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of a Ray task, where it becomes one."""


class SideTaskFailedError(Exception):
    """It raised this."""


class SideTaskDiedError(Exception):
    """Its process ended before it was done."""


class Sink(Protocol):
    """The driver, as an engine sees it. Called on the driver's loop."""

    def on_capacity(self, hosts: tuple[HostView, ...]) -> None: ...

    def on_reserved(self, reservation: int) -> None: ...

    def on_reservation_failed(self, reservation: int, reason: str) -> None: ...

    def on_lost(self, host: HostId, failure: Failure) -> None: ...

    def on_message(self, host: HostId, message: wire.AnyFromAgent) -> None: ...

    def on_trouble(self, line: str) -> None:
        """Something that the user should know, and that the engine goes on in spite of."""
        ...

    def on_broken(self, error: BaseException) -> None:
        """The engine itself can't go on: the run ends with this as its cause."""
        ...


class Engine(Protocol):
    """Where hosts come from."""

    shares_machine: bool
    """Hosts are on the driver's machine, and have its environment."""

    @property
    def brings_folder(self) -> bool:
        """Hosts have a working folder for the workers (Ray's ``working_dir``), and the driver's is of no use
        there. Asked once the engine is open.
        """
        ...

    def whoami(self) -> str:
        """This driver, as the engine knows it, so that its death can be proven from another machine. Empty:
        it can't.
        """
        ...

    def is_dead(self, driver: str) -> bool:
        """Whether the driver with this ``whoami()`` has ended."""
        ...

    async def open(self, sink: Sink, request: EngineRequest) -> None:
        """Find hosts, and report them to ``sink``. Raises ``InfeasibleResourcesError`` for what can never be
        had.
        """
        ...

    def held(self) -> list[HostId]:
        """Hosts that an earlier driver of this run left behind."""
        ...

    def count_silence(self) -> None:
        """What was left behind has been taken over: from now on, a host that is silent for too long is lost.
        Before, it is not while its agent is known to live.
        """
        ...

    def claim(self, host: HostId) -> None:
        """Take over a host that this run holds already; its agent then reports what it has."""
        ...

    def unclaim(self, host: HostId) -> None: ...

    def request_capacity(self, workers: int) -> None: ...

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None: ...

    def release(self, slices: tuple[SliceName, ...]) -> None: ...

    def send(self, host: HostId, message: wire.AnyToAgent) -> None: ...

    def retire(self, host: HostId) -> None:
        """The host counts as lost; it may be used again once it has confirmed that its workers ended."""
        ...

    def address(self, host: HostId) -> str:
        """Where other hosts reach this one."""
        ...

    def source(self, host: HostId) -> PeerAddress:
        """Where agents of other hosts can ask this one's for snapshots."""
        ...

    def devices(self, host: HostId) -> tuple[str, ...]:
        """The accelerators of a host, as the framework's visibility variable names them."""
        ...

    def time_here(self, host: HostId, at: float) -> float:
        """A time by the monotonic clock of a host, by that of the driver."""
        ...

    async def run_side_task(self, work: SideTask) -> bytes:
        """Do work beside training. Raises ``SideTaskFailedError`` or ``SideTaskDiedError``; cancelled, it is
        ended.
        """
        ...

    async def close(self, *, keep_hosts: bool) -> None:
        """Let go of everything. ``keep_hosts``: another driver has them now."""
        ...


def waits_for(hosts: Iterable[HostId], limits: Deadlines) -> str:
    """For the user, where agents that an earlier driver left are slow to answer."""
    return (
        f"waiting for an answer from {', '.join(sorted(hosts))}, where an earlier driver left workers "
        f"(at most {limits.take_over_s:g} s: Deadlines.take_over_s)"
    )


def not_taken_over(why: str) -> str:
    """For the user, where workers that an earlier driver left can't go on."""
    return f"workers of an earlier driver are ended, and the run goes on from its newest checkpoint: {why}"
