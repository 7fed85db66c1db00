"""Processes that torchrun started send each other messages through the store that it gave them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from everstep.backend.base import Endpoint, Member

_WAIT = timedelta(hours=1)
"""How long to wait for what the others do at about the same time: sharing something, or a barrier."""
_POLL = timedelta(minutes=1)
_numbers = itertools.count(1)


class TorchrunGroup:
    """``everstep.backend.launched.LaunchedGroup`` over a ``TCPStore``."""

    def __init__(self, member: Member) -> None:
        self.member = member
        # The store outlives the processes that torchrun restarts; and a script may train more than once.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"everstep/{attempt}/{next(_numbers)}"
        self.endpoint: Endpoint = {
            "address": os.environ["MASTER_ADDR"],
            "port": int(os.environ["MASTER_PORT"]),
            "prefix": self._prefix,
        }
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._server = None if hosted or member.rank else self._connect(is_master=True)
        self._store = self._connected()
        self._sending = self._connected()  # while the function's own thread waits at a barrier
        self._upwards = itertools.count(1)
        self._downwards = [itertools.count(1) for _ in range(member.world_size)]
        self._awaited: dict[str, str] = {}
        """The keys that threads wait for, by where the messages come from."""
        self._hung_up = False
        self._shared = itertools.count(1)
        self._barriers = itertools.count(1)

    def _connect(self, *, is_master: bool = False) -> dist.TCPStore:
        address, port = str(self.endpoint["address"]), int(self.endpoint["port"])
        return dist.TCPStore(address, port, is_master=is_master, timeout=_WAIT, wait_for_workers=False)

    def _connected(self) -> dist.PrefixStore:
        """A new connection: waiting on one would hold up all others that use it."""
        return dist.PrefixStore(self._prefix, self._connect())

    def share(self, data: bytes) -> bytes:
        key = f"shared/{next(self._shared)}"
        if self.member.rank == 0:
            self._store.set(key, data)
            return data
        return bytes(self._store.get(key))

    def barrier(self) -> None:
        key = f"barrier/{next(self._barriers)}"
        if self._store.add(key, 1) == self.member.world_size:
            self._store.set(f"{key}/all", b"1")
        self._store.wait([f"{key}/all"], _WAIT)

    def send_to_leader(self, frame: bytes) -> None:
        self._sending.set(f"up/{self.member.rank}/{next(self._upwards)}", frame)

    def messages_from(self, rank: int) -> Iterator[bytes]:
        return self._messages(f"up/{rank}")

    def send_to(self, rank: int, frame: bytes) -> None:
        self._sending.set(f"down/{rank}/{next(self._downwards[rank])}", frame)

    def messages_from_leader(self) -> Iterator[bytes]:
        return self._messages(f"down/{self.member.rank}")

    def _messages(self, where: str) -> Iterator[bytes]:
        store = self._connected()
        for number in itertools.count(1):
            key = self._awaited[where] = f"{where}/{number}"
            while not self._hung_up:
                try:
                    store.wait([key], _POLL)
                    break
                except dist.DistNetworkError:
                    return  # the launcher is gone, and all of its processes with it
                except dist.DistStoreError:
                    continue  # nothing yet
            if self._hung_up:
                return
            message = bytes(store.get(key))
            store.delete_key(key)
            yield message

    def hang_up(self) -> None:
        self._hung_up = True
        with suppress(dist.DistNetworkError):  # the launcher is gone, and nobody waits any more
            for key in [*self._awaited.values()]:
                self._sending.set(key, b"")
