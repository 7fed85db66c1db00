"""How a framework turns workers into one distributed job.

A backend travels with the training function to the workers. It knows nothing of hosts or engines: the driver
decides who is in a group, the backend only joins them. It decides nothing about failures either; it only
distinguishes the echo of a peer's death from a cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

Endpoint = dict[str, str | int]
"""What a group's leader tells the others: JSON-like, small, defined by each backend."""


@dataclass(frozen=True)
class Member:
    """A worker's place in its worker group. Ranks are dense at the start of an epoch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    slice_id: int = 0
    num_slices: int = 1
    group_id: int = 0
    num_groups: int = 1
    group_rank: int = 0
    group_size: int = 1
    bind_address: str = "127.0.0.1"
    """The address of this host that the others can reach; loopback on one machine."""
    devices: tuple[str, ...] = ()
    """Accelerators of this worker alone, as the framework's visibility variable names them."""
    device_kind: str = ""
    """``"gpu"``, ``"tpu"`` or empty for CPU."""
    slice_leaders: tuple[str, ...] = field(default=())
    """Address of the first host of every slice, in slice order."""


@runtime_checkable
class Backend(Protocol):
    """How a group of workers becomes a distributed job. Every method runs on the worker's host."""

    def preload(self) -> tuple[str, ...]:
        """Modules that the template imports before it forks. Without their packages no worker can start."""
        ...

    def probe(self) -> None:
        """One small operation, run in a throw-away fork of the template: it must not hang."""
        ...

    def environment(self, member: Member) -> Mapping[str, str | None]:
        """Variables for this worker, set before any of its code runs. ``None`` removes one."""
        ...

    def host(self, member: Member) -> Endpoint:
        """On the group's leader only: take the rendezvous port and say where it is."""
        ...

    def join(self, member: Member, endpoint: Endpoint, timeout_s: float) -> None:
        """On every member: become part of the group, or raise within ``timeout_s``."""
        ...

    def leave(self, member: Member) -> None:
        """After the training function returned. Errors because peers are already gone are not errors."""
        ...

    def is_peer_failure(self, error: BaseException) -> bool:
        """Whether this looks like the echo of another worker's death, rather than a cause."""
        ...

    def is_peer_abort(self, signal_number: int, log_tail: str) -> bool:
        """The same for a process that a signal ended: some frameworks abort when a peer dies."""
        ...

    def collectives(self) -> tuple[int, int]:
        """How many this process has begun: (of the whole group, of parts of it). Called from another thread,
        also while one is under way.
        """
        ...

    def reseed(self, seed: int) -> None:
        """Give the framework's own random state this seed; a fork starts with its parent's."""
        ...


def packages_of(backend: Backend) -> list[str]:
    """Packages that every host of this backend's workers needs."""
    return list(dict.fromkeys(name.partition(".")[0] for name in backend.preload()))


class NoBackend:
    """No framework: the training function on N workers, and nothing between them."""

    def preload(self) -> tuple[str, ...]:
        return ()

    def probe(self) -> None:
        return None

    def environment(self, member: Member) -> Mapping[str, str | None]:
        return {}

    def host(self, member: Member) -> Endpoint:
        return {}

    def join(self, member: Member, endpoint: Endpoint, timeout_s: float) -> None:
        return None

    def leave(self, member: Member) -> None:
        return None

    def is_peer_failure(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionError)

    def is_peer_abort(self, signal_number: int, log_tail: str) -> bool:
        return False

    def collectives(self) -> tuple[int, int]:
        return 0, 0

    def reseed(self, seed: int) -> None:
        return None
