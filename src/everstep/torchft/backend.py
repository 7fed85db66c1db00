"""torchft: each replica group is a PyTorch process group of its own, and the groups agree on a quorum every
step.

torchft decides the quorum. Here is what a worker needs for it: the address of the lighthouse (a forwarder on
its own host, which the agent runs), and fixes for torchft 0.2.0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from everstep.backend.base import Endpoint, Member
from everstep.backend.peer_errors import with_causes
from everstep.backend.torch import TorchBackend, TorchConfig
from everstep.errors import ConfigError
from everstep.refusals import answers_unknown_arguments
from everstep.torchft.server import OPTIONS

QUORUM_RETRIES = 1_000_000
"""With torchft's default of none, every replica dies once its first request after the lighthouse's death
times out. It is put back within a second; how long a worker may wait for it is no reason to end.
"""

MEETING_S = 5.0
"""How long the members of a new quorum wait for each other. One may have died since it was counted in."""

# The error of a rank whose group has lost its manager, which lives in the leader.
_MANAGER_GONE = re.compile(
    r'status: .*message: "(transport error|tcp connect error|operation was canceled|connection error'
    r"|h2 protocol error|error reading a body)"
)


@answers_unknown_arguments
@dataclass(frozen=True, init=False)
class TorchftConfig(TorchConfig):
    """Replica groups over torchft: what fails is replaced, while the others train on.

    Args:
        lighthouse_kwargs: What torchft's ``LighthouseServer`` is started with: ``min_replicas`` (1),
            ``join_timeout_ms``, ``quorum_tick_ms``, ``heartbeat_timeout_ms``. Everstep chooses where it
            listens.
        replica_group_size: Workers that together hold one copy of the model.
        min_replica_groups: The fewest groups that the run may go on with when there is no place for the
            others; also enough for a start. By default ``ScalingConfig(num_workers=(min, max))`` says so;
            with a fixed number a start waits for all, and one group is enough to go on with.
        max_replica_failures: How many replacements of groups are allowed, -1 for no limit; after that, all
            workers restart, which spends ``max_failures``. By default a replacement spends ``max_failures``
            itself.
        backend, init_method, timeout_s: As in ``TorchConfig``, for the process group inside a replica group.
    """

    lighthouse_kwargs: Mapping[str, int] = field(default_factory=dict)
    replica_group_size: int = 1
    min_replica_groups: int | None = None
    max_replica_failures: int | None = None

    def __init__(
        self,
        lighthouse_kwargs: Mapping[str, int] | None = None,
        *,
        replica_group_size: int = 1,
        min_replica_groups: int | None = None,
        max_replica_failures: int | None = None,
        backend: str | None = None,
        init_method: str = "env",
        timeout_s: float = 1800,
    ) -> None:
        # Ray Train's takes lighthouse_kwargs first, which a dataclass that inherits can't.
        given = {
            "backend": backend,
            "init_method": init_method,
            "timeout_s": timeout_s,
            "lighthouse_kwargs": {} if lighthouse_kwargs is None else lighthouse_kwargs,
            "replica_group_size": replica_group_size,
            "min_replica_groups": min_replica_groups,
            "max_replica_failures": max_replica_failures,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_lighthouse()
        self._check_count("replica_group_size", self.replica_group_size, 1)
        if self.min_replica_groups is not None:
            self._check_count("min_replica_groups", self.min_replica_groups, 1)
        if self.max_replica_failures is not None:
            self._check_count("max_replica_failures", self.max_replica_failures, -1)

    def _check_lighthouse(self) -> None:
        name = "TorchftConfig.lighthouse_kwargs"
        if not isinstance(self.lighthouse_kwargs, Mapping):
            raise ConfigError(
                f"{name} is {self.lighthouse_kwargs!r}, expected a dict.",
                "Write lighthouse_kwargs={'min_replicas': 1}, for example.",
                name,
            )
        for key, value in self.lighthouse_kwargs.items():
            if key == "bind":
                raise ConfigError(
                    f"{name}['bind'] is {value!r}, expected none: it may come back elsewhere.",
                    "Leave it out; workers reach it at TORCHFT_LIGHTHOUSE, wherever it is.",
                    name,
                )
            if key not in OPTIONS:
                raise ConfigError(
                    f"{name} has {key!r}, expected some of {', '.join(OPTIONS)}.", "Leave it out.", name
                )
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name}[{key!r}] is {value!r}, expected an int of at least 1.",
                    f"Leave it out for {OPTIONS[key]}.",
                    name,
                )

    def _check_count(self, name: str, value: object, least: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"TorchftConfig.{name} is {value!r}, expected an int of at least {least}.",
                "Leave it out for the default.",
                f"TorchftConfig.{name}",
            )


class TorchftBackend(TorchBackend):
    """A process group for each replica group, and torchft between them."""

    config: TorchftConfig

    def __init__(self, config: TorchftConfig) -> None:
        super().__init__(config)

    def lighthouse(self) -> Mapping[str, int]:
        return self.config.lighthouse_kwargs

    def preload(self) -> tuple[str, ...]:
        return (*super().preload(), "torchft")

    def environment(self, member: Member) -> Mapping[str, str | None]:
        return {
            **super().environment(member),
            "REPLICA_GROUP_ID": str(member.group_id),
            "NUM_REPLICA_GROUPS": str(member.num_groups),
            "TORCHFT_QUORUM_RETRIES": str(QUORUM_RETRIES),
        }

    def join(self, member: Member, endpoint: Endpoint, timeout_s: float) -> None:
        super().join(member, endpoint, timeout_s)
        patch_torchft(member.group_size)

    def is_peer_failure(self, error: BaseException) -> bool:
        return super().is_peer_failure(error) or any(
            isinstance(seen, (RuntimeError, TimeoutError)) and bool(_MANAGER_GONE.search(str(seen)))
            for seen in with_causes(error)
        )


def patch_torchft(group_size: int) -> None:
    """Let this process's torchft ask for quorums as ``_Client`` does, and meet in bounded time."""
    import torchft.manager as manager
    from torchft.process_group import ProcessGroupGloo

    if not issubclass(manager.ManagerClient, _Client):
        manager.ManagerClient = patched(manager.ManagerClient, group_size)
        meet_in_bounded_time(ProcessGroupGloo)


def meet_in_bounded_time(process_group: type) -> None:
    """The time-out that the user gives is for all-reduces, which may take long. torchft 0.2.0 also waits as
    long for a member that dies while the others connect to it, and nobody trains meanwhile. A member that
    gives up too early meets the others in the next quorum.
    """
    import torch

    configure = process_group.configure  # type: ignore[attr-defined]

    def configure_soon(self: Any, *args: Any, **kwargs: Any) -> None:
        given, self._timeout = self._timeout, min(self._timeout, timedelta(seconds=MEETING_S))
        try:
            configure(self, *args, **kwargs)
        finally:
            self._timeout = given
        self.parent._get_backend(torch.device("cpu")).set_timeout(given)

    process_group.configure = configure_soon  # type: ignore[attr-defined]


def patched(client: type, group_size: int) -> type:
    return type("ManagerClient", (_Client,), {"inner": client, "group_size": group_size})


class _Client:
    """torchft's ``ManagerClient``, with two fixes for torchft 0.2.0. Each goes when torchft has its own.

    *Ids that differ across lighthouses.* A new lighthouse counts from 1 again. torchft reconfigures its
    process group only when the id is another than before, and meets at a key made from it: so a group that
    remembers the same number from the lighthouse before would skip the reconfiguration, or meet where old
    addresses still stand.

    *A group heals as one, or not at all.* Each rank receives the state by itself, and when the group that
    sends it dies meanwhile, one rank may have it and its partner not. They don't commit that step. But then
    each rank reports the step that it has, torchft takes the last one, and the other rank would train on with
    an old state. So all of them report the step from before, until a step is committed: they heal again.
    """

    inner: Any
    group_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = self.inner(*args, **kwargs)
        self._seen: tuple[object, ...] = ()
        self._id = -1
        self._unhealed: int | None = None
        """The step that this group had when it began to heal, until it has committed another."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *, step: int, **more: Any) -> _Quorum:
        own_step = step if self._unhealed is None else self._unhealed
        result = self._client._quorum(step=own_step, **more)
        if self._unhealed is not None and not result.heal:
            raise RuntimeError(
                f"This group was taking its state of a later step than {own_step} from another when that "
                "failed, and nobody has a later one any more: its ranks may differ. It has to start anew."
            )
        if self.group_size > 1 and own_step < result.max_step:
            self._unhealed = own_step
        return _Quorum(result, self._id_of(result))

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:
        commits: bool = self._client.should_commit(*args, **kwargs)
        if commits:
            self._unhealed = None
        return commits

    def _id_of(self, result: Any) -> int:
        seen = (result.quorum_id, tuple(result.replica_ids))
        # A member that is behind has missed a quorum, perhaps the first of a new lighthouse. For the others
        # that one was a change, and this one is none. All members see that one is behind, and make the same
        # id of it.
        one_is_behind = result.max_world_size < result.replica_world_size
        if seen != self._seen or one_is_behind:
            self._seen = seen
            self._id = _digest(*seen, result.max_step)
        return self._id


class _Quorum:
    def __init__(self, result: Any, quorum_id: int) -> None:
        self._result = result
        self.quorum_id = quorum_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)


def _digest(*facts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "big") >> 1
