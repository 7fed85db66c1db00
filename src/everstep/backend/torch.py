"""PyTorch: the workers of a replica group become one process group, over gloo on CPUs and NCCL on GPUs.
Without replica groups that is all of them.

The leader listens before it says where, and gives the listening socket to torch's store: nobody else can
take the port in between, and a peer that connects early waits in the backlog instead of trying again.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from everstep.backend.base import Endpoint, Member
from everstep.backend.deadline_calls import finish_within
from everstep.backend.launched import LaunchedGroup
from everstep.backend.network import interface_variables, is_loopback, listen
from everstep.backend.peer_errors import is_gloo_echo, with_causes
from everstep.backend.visibility import visible_devices
from everstep.errors import ConfigError
from everstep.refusals import answers_unknown_arguments
from everstep.storage.private import shared_temporary

LEADER_STAYS_S = 3600.0
"""How long the leader, who hosts the store, stays for ranks that still train after it returned."""
DESTROY_S = 10.0
"""How long taking the process group down may take. NCCL may wait for peers that are gone."""

_STORE_PREFIX = "everstep"  # not torch's own "default_pg": a group that the user makes over env:// is new
_JOINED, _LEFT = "everstep/joined", "everstep/left"

_OWN_MISTAKE = re.compile(r"ncclInvalid(Usage|Argument)|invalid usage|Duplicate GPU", re.IGNORECASE)

_joined: Member | None = None


def joined_member() -> Member | None:
    """The place that this process took in its group; ``None`` outside of a worker."""
    return _joined


@answers_unknown_arguments
@dataclass(frozen=True)
class TorchConfig:
    """How the process group is set up.

    Args:
        backend: What ``torch.distributed.init_process_group`` takes. By default ``"nccl"`` where workers have
            GPUs, else ``"gloo"``.
        init_method: ``"env"`` or ``"tcp"``, as in Ray Train. Both meet at the same port, which no other
            process can take; ``MASTER_ADDR`` and ``MASTER_PORT`` are set either way.
        timeout_s: Seconds after which an operation of the group fails. A peer's death doesn't wait for it.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if self.backend is not None and (not isinstance(self.backend, str) or not self.backend):
            raise ConfigError(
                f"TorchConfig.backend is {self.backend!r}, expected a name such as 'gloo', or None.",
                "Leave it out for the one that fits the workers.",
                "TorchConfig.backend",
            )
        if self.init_method not in ("env", "tcp"):
            raise ConfigError(
                f"TorchConfig.init_method is {self.init_method!r}, expected 'env' or 'tcp'.",
                "Leave it out.",
                "TorchConfig.init_method",
            )
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not number or not 0 < self.timeout_s < 10**9:
            raise ConfigError(
                f"TorchConfig.timeout_s is {self.timeout_s!r}, expected a number of seconds above 0.",
                "Leave it out for 1800.",
                "TorchConfig.timeout_s",
            )


class TorchBackend:
    """A process group over the workers of a replica group, which are all where there are no such groups."""

    def __init__(self, config: TorchConfig | None = None) -> None:
        self.config = config or TorchConfig()
        self._listener: socket.socket | None = None
        self._store: Any = None
        self._hosts_store = False

    def __reduce__(self) -> tuple[type[TorchBackend], tuple[TorchConfig]]:
        return type(self), (self.config,)

    def preload(self) -> tuple[str, ...]:
        # The first optimizer or DistributedDataParallel imports torch._dynamo, 800 modules and about as slow
        # as torch itself: once in the template, rather than in every rank at every restart.
        return ("torch", "torch.distributed", "torch.utils.data", "torch._dynamo")

    def probe(self) -> None:
        import torch

        # Both enter the pool of OpenMP threads, which a fork of a process that has one waits for in vain.
        torch.ones(1 << 20).add_(1)
        torch.ones(256, 256) @ torch.ones(256, 256)

    def collectives(self) -> tuple[int, int]:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return 0, 0
        whole = dist.group.WORLD
        counts = {group: _count(group) for group in [*dist.distributed_c10d._world.pg_map]}
        of_all = counts.pop(whole, 0)
        return of_all, sum(counts.values())

    def is_peer_abort(self, signal_number: int, log_tail: str) -> bool:
        return False

    def reseed(self, seed: int) -> None:
        """Torch's random state, on CPU and on this worker's devices; data loaders draw theirs from it."""
        import torch

        torch.manual_seed(seed)

    def environment(self, member: Member) -> Mapping[str, str | None]:
        """What torchrun sets, and what Ray Train adds. The address is known only in ``join``."""
        variables: dict[str, str | None] = {
            "RANK": str(member.group_rank),
            "WORLD_SIZE": str(member.group_size),
            "LOCAL_RANK": str(member.local_rank),
            "LOCAL_WORLD_SIZE": str(member.local_world_size),
            "GROUP_RANK": str(member.node_rank),
            "GROUP_WORLD_SIZE": str(member.num_nodes),
            "NODE_RANK": str(member.node_rank),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(member.group_rank),
            "ROLE_WORLD_SIZE": str(member.group_size),
            "TORCHELASTIC_RUN_ID": "everstep",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # The store outlives a group that the user destroys: one made anew over env:// is its client.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": None,
            "MASTER_ADDR": None,
            "MASTER_PORT": None,
            "ACCELERATE_TORCH_DEVICE": "cuda:0" if member.device_kind == "gpu" else "cpu",
        }
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            # By default it is in the temporary folder, and that goes with each attempt: the next one would
            # compile everything again.
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(shared_temporary() / f"torchinductor_{os.getuid()}")
        variables |= visible_devices(member)
        variables |= interface_variables(member.bind_address)
        if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
            variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
        return variables

    def launched(self, member: Member) -> LaunchedGroup:
        """Processes that torchrun started meet at the store that it gave them."""
        from everstep.backend.torchrun import TorchrunGroup

        return TorchrunGroup(member)

    def host(self, member: Member) -> Endpoint:
        self._listener = listen(member.bind_address)
        return {"address": member.bind_address, "port": self._listener.getsockname()[1]}

    def join(self, member: Member, endpoint: Endpoint, timeout_s: float) -> None:
        import torch
        import torch.distributed as dist

        global _joined
        address, port = str(endpoint["address"]), int(endpoint["port"])
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        _share_cores(torch, member)
        timeout = timedelta(seconds=timeout_s)
        listener, self._listener = self._listener, None
        self._hosts_store = listener is not None
        self._store = dist.TCPStore(
            address,
            port,
            is_master=self._hosts_store,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        if "prefix" in endpoint:  # a store that others use, or have used, as well
            self._store = dist.PrefixStore(str(endpoint["prefix"]), self._store)
        self._meet(member, timeout)
        self._count(_JOINED, member)
        _joined = member

    def _meet(self, member: Member, timeout: timedelta) -> None:
        """Make the process group."""
        import torch
        import torch.distributed as dist

        if member.device_kind == "gpu":
            torch.cuda.set_device(0)
        dist.init_process_group(
            self.config.backend or ("nccl" if member.device_kind == "gpu" else "gloo"),
            store=dist.PrefixStore(_STORE_PREFIX, self._store),
            rank=member.group_rank,
            world_size=member.group_size,
            timeout=timeout,
        )
        # Meeting had the deadline of a start; from here on the group has the user's.
        timeout = timedelta(seconds=self.config.timeout_s)
        dist.distributed_c10d._set_pg_timeout(timeout)
        self._store.set_timeout(timeout)

    def leave(self, member: Member) -> None:
        import torch.distributed as dist

        if self._store is None:
            return
        if member.group_size > 1:
            # A rank that has met all others may be done before two of those have met each other: it must stay
            # until then.
            self._unless_peers_are_gone(LEADER_STAYS_S, lambda: self._wait_for_all(_JOINED))
        if dist.is_available() and dist.is_initialized():
            self._unless_peers_are_gone(DESTROY_S, dist.destroy_process_group)
        if member.group_size > 1:
            self._unless_peers_are_gone(LEADER_STAYS_S, lambda: self._leave_store(member))
        self._store = None

    def _leave_store(self, member: Member) -> None:
        self._count(_LEFT, member)
        if self._hosts_store:
            self._wait_for_all(_LEFT)

    def _count(self, what: str, member: Member) -> None:
        if self._store.add(what, 1) == member.group_size:
            self._store.set(f"{what} by all", "1")

    def _wait_for_all(self, what: str) -> None:
        self._store.wait([f"{what} by all"], timedelta(seconds=LEADER_STAYS_S))

    def _unless_peers_are_gone(self, seconds: float, action: Callable[[], object]) -> None:
        try:
            finish_within(seconds, action)
        except RuntimeError as error:
            if not self.is_peer_failure(error):
                raise

    def is_peer_failure(self, error: BaseException) -> bool:
        import torch.distributed as dist

        if not dist.is_available():
            return False
        lost_peer = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
        return any(
            is_gloo_echo(seen) or (isinstance(seen, lost_peer) and not _OWN_MISTAKE.search(str(seen)))
            for seen in with_causes(error)
        )


def _share_cores(torch: Any, member: Member) -> None:
    """Give each worker of this machine its part of the cores, unless the user has said how many."""
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = member.world_size if is_loopback(member.bind_address) else member.local_world_size
    torch.set_num_threads(max(1, cores // sharing))


def gpus_here() -> int:
    """How many GPUs torch sees on this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _count(group: Any) -> int:
    """Of a process group that may be on its way out."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that doesn't count
        return 0
