"""Processes that a launcher such as torchrun has started: with ``num_workers=0`` they are one group.

The launcher describes them in the environment. How they reach each other is up to a backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from everstep.backend.base import Endpoint, Member

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RUN_ID = "TORCHELASTIC_RUN_ID"
_OWN_RUN_ID = "everstep"
"""The value in our own workers, which no launcher has started."""


def launched_member(environment: Mapping[str, str], devices: tuple[str, ...] = ()) -> Member | None:
    """This process's place among those that a launcher started, or None if none did."""
    if any(name not in environment for name in _VARIABLES) or environment.get(_RUN_ID) == _OWN_RUN_ID:
        return None
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local_rank, local_world = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    return Member(
        rank,
        world,
        local_rank,
        local_world,
        rank // local_world,
        world // local_world,
        group_rank=rank,
        group_size=world,
        bind_address=environment["MASTER_ADDR"],
        devices=devices[local_rank : local_rank + 1],
        device_kind="gpu" if devices else "",
    )


class LaunchedGroup(Protocol):
    """The processes of one launch, as one of them sees them. Rank 0 keeps the run for all."""

    member: Member
    endpoint: Endpoint

    def share(self, data: bytes) -> bytes:
        """Rank 0's data, at every rank. Called equally often by all."""
        ...

    def barrier(self) -> None: ...

    def send_to_leader(self, frame: bytes) -> None: ...

    def messages_from(self, rank: int) -> Iterator[bytes]:
        """What this rank tells the leader, in order. Waits for more; for a thread of its own."""
        ...

    def send_to(self, rank: int, frame: bytes) -> None:
        """From rank 0 to another one."""
        ...

    def messages_from_leader(self) -> Iterator[bytes]: ...

    def hang_up(self) -> None:
        """End all that waits for messages."""
        ...


@runtime_checkable
class JoinsLaunched(Protocol):
    """A backend that knows how launched processes reach each other."""

    def launched(self, member: Member) -> LaunchedGroup: ...
