"""JAX: workers become one ``jax.distributed`` job; on CPUs its collectives go over gloo.

JAX's coordinator lives in the leader and takes no socket, only an address that it binds itself, and a port
that somebody else has taken crashes it. So the port is held until the coordinator is up (``hold_port``), and
is a new one in every epoch.

Known in JAX 0.10 (tried), and handled here:

- A peer's death reaches the others as an error in their collective, within milliseconds. The leader's death
  takes the coordinator along, and JAX ends every other process with ``SIGABRT`` within 0.1 s, which nothing
  in Python can prevent: ``is_peer_abort`` knows the message that it prints.
- Without ``jax_enable_recoverability`` leaving is a barrier, and a peer that is gone turns it into an abort
  of all others, minutes later. With it nobody waits, so the leader has to stay until all have left.
- A client that connects before the coordinator listens tries again after a second.
- JAX takes ``SIGTERM`` for a notice of preemption and swallows it. Here it means what it did before.
- Behind an HTTP proxy, gRPC asks the proxy for loopback, and hangs.
- Gloo binds what the machine's own name resolves to, and fails where it doesn't.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.backend.base import Endpoint, Member
from everstep.backend.deadline_calls import finish_within
from everstep.backend.network import hold_port, interface_variables, join_address, wait_until_listening
from everstep.backend.peer_errors import is_gloo_echo, with_causes
from everstep.backend.visibility import visible_devices
from everstep.errors import ConfigError
from everstep.process import kernel
from everstep.refusals import answers_unknown_arguments

LEADER_STAYS_S = 3600.0
"""How long the leader, who hosts the coordinator, stays for ranks that still train after it returned."""
DISCONNECT_S = 10.0
"""How long disconnecting from the coordinator may take."""
_ABORT_MARGIN_S = 60.0  # JAX ends the process at its own time limit: ours comes first, and is an exception

_MULTISLICE_PORT = "MEGASCALE_PORT"
_DEFAULT_MULTISLICE_PORT = 8081
"""Ray Train's, too: a port that differed from start to start would pass no firewall."""
_MULTISLICE = (
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    _MULTISLICE_PORT,
)
_PLATFORMS = {"gpu": "cuda", "tpu": "tpu", "": "cpu"}

_COORDINATION_ECHO = re.compile(
    r"^(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL|UNKNOWN)\b.*"
    r"(coordination|barrier|GetKeyValue|heartbeat|socket closed|peer|remote process exited|ncclRemoteError"
    r"|connection reset)",
    re.IGNORECASE | re.DOTALL,
)
_ABORT_MESSAGE = "the JAX distributed service detected fatal errors"


@answers_unknown_arguments
@dataclass(frozen=True)
class JaxConfig:
    """How JAX is set up. Ray Train's fields; ``ScalingConfig`` says the same, so that none is needed.

    Args:
        use_tpu: The workers have TPUs: ``ScalingConfig(use_tpu=True)``.
        use_gpu: The workers have GPUs: ``ScalingConfig(use_gpu=True)``.
    """

    use_tpu: bool = False
    use_gpu: bool = False

    def __post_init__(self) -> None:
        for name in ("use_tpu", "use_gpu"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"JaxConfig.{name} is {getattr(self, name)!r}, expected True or False.",
                    f"Leave it out: ScalingConfig({name}=…) is enough.",
                    f"JaxConfig.{name}",
                )
        if self.use_tpu and self.use_gpu:
            raise ConfigError(
                "JaxConfig has both use_tpu and use_gpu, expected one of them.",
                "Leave them out: ScalingConfig says what the workers have.",
                "JaxConfig.use_gpu",
            )


class JaxBackend:
    """One ``jax.distributed`` job over all workers. A single worker gets one as well."""

    def __init__(self, config: JaxConfig | None = None) -> None:
        self.config = config or JaxConfig()
        self._held: socket.socket | None = None

    def __reduce__(self) -> tuple[type[JaxBackend], tuple[JaxConfig]]:
        return type(self), (self.config,)

    def preload(self) -> tuple[str, ...]:
        return ("jax", "jax.numpy", "jax.experimental.multihost_utils")

    def probe(self) -> None:
        import jax.numpy as jnp

        jnp.ones((64, 64)).sum().block_until_ready()

    def reseed(self, seed: int) -> None:
        """JAX has no random state of its own: keys are the user's."""

    def environment(self, member: Member) -> Mapping[str, str | None]:
        variables: dict[str, str | None] = dict.fromkeys(_MULTISLICE)
        if member.num_slices > 1:
            del variables[_MULTISLICE_PORT]  # the user's, for the leader to read
        # Stale ones would be taken for arguments that we leave out.
        variables |= dict.fromkeys(
            ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS")
        )
        variables |= visible_devices(member)
        variables |= interface_variables(member.bind_address)
        if not os.environ.get("JAX_PLATFORMS"):
            variables["JAX_PLATFORMS"] = _PLATFORMS.get(member.device_kind)
        return variables

    def host(self, member: Member) -> Endpoint:
        multislice = _multislice_port() if member.num_slices > 1 else 0
        self._held = _hold_port_beside(
            member.bind_address, range(multislice, multislice + member.local_world_size)
        )
        endpoint: Endpoint = {"address": member.bind_address, "port": self._held.getsockname()[1]}
        if member.num_slices > 1:
            endpoint["multislice_port"] = multislice
        return endpoint

    def join(self, member: Member, endpoint: Endpoint, timeout_s: float) -> None:
        import jax

        deadline = time.monotonic() + timeout_s
        address, port = str(endpoint["address"]), int(endpoint["port"])
        kernel.set_environment(_multislice_variables(member, endpoint) | _around_proxies(address))
        if not jax.config.jax_platforms:
            jax.config.update("jax_platforms", _PLATFORMS.get(member.device_kind))
        _put_gloo_on(member.bind_address)
        if self._held is None:
            wait_until_listening(address, port, deadline)

        def connect() -> None:
            jax.distributed.initialize(
                coordinator_address=join_address(address, port),
                num_processes=member.world_size,
                process_id=member.rank,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(timeout_s + _ABORT_MARGIN_S),
                coordinator_bind_address=join_address(member.bind_address, port),
            )

        with _sigterm_as_before(), _without_warnings():
            _keep_what_is_compiled()
            _set_option("jax_enable_recoverability", True)
            _set_option("jax_check_proxy_envs", False)
            joined = finish_within(max(0.0, deadline - time.monotonic()), connect)
        if not joined:
            raise TimeoutError(
                f"not all {member.world_size} processes met at JAX's coordinator "
                f"{join_address(address, port)} within {timeout_s:g} s"
            )
        if self._held is not None:
            self._held.close()
            self._held = None

    def leave(self, member: Member) -> None:
        import jax

        client = _coordination_client()
        if client is None:
            return
        _set_log_level(_FATAL_ONLY)
        try:
            if member.rank == 0 and member.world_size > 1 and _recoverable():
                # Ends when no other process is connected any more: none of them asks the same.
                ranks = list(range(member.world_size))
                finish_within(LEADER_STAYS_S, lambda: client.get_live_nodes(ranks))
            finish_within(DISCONNECT_S, jax.distributed.shutdown)
        except RuntimeError as error:
            if not self.is_peer_failure(error):
                raise

    def is_peer_failure(self, error: BaseException) -> bool:
        import jax

        return any(
            is_gloo_echo(seen)
            or (isinstance(seen, jax.errors.JaxRuntimeError) and _COORDINATION_ECHO.search(str(seen)))
            for seen in with_causes(error)
        )

    def collectives(self) -> tuple[int, int]:
        return 0, 0  # XLA runs them inside its own programs, and counts none

    def is_peer_abort(self, signal_number: int, log_tail: str) -> bool:
        """Whether JAX ended a process, which then leaves no exception, because its leader died."""
        return signal_number == signal.SIGABRT and _ABORT_MESSAGE in log_tail


class JaxScriptBackend(JaxBackend):
    """``JaxBackend`` for scripts that call ``jax.distributed.initialize()`` themselves: the call does
    nothing.
    """

    def join(self, member: Member, endpoint: Endpoint, timeout_s: float) -> None:
        super().join(member, endpoint, timeout_s)
        import jax

        jax.distributed.initialize = _is_initialized


def _is_initialized(*_: Any, **__: Any) -> None:
    """In place of ``jax.distributed.initialize``: the processes have met already."""


def _multislice_port() -> int:
    """The port at which slices reach each other. The user can choose it, so that firewalls let it through."""
    given = os.environ.get(_MULTISLICE_PORT, "").strip() or str(_DEFAULT_MULTISLICE_PORT)
    if not given.isdecimal() or not 0 < int(given) < 1 << 16:
        raise ConfigError(
            f"{_MULTISLICE_PORT} is {given!r}, expected the number of a port.",
            f"Leave it out for {_DEFAULT_MULTISLICE_PORT}, or set a number from 1 to 65535.",
            _MULTISLICE_PORT,
        )
    return int(given)


def _hold_port_beside(address: str, taken: range) -> socket.socket:
    """A free port that is none of these."""
    held = hold_port(address)
    while held.getsockname()[1] in taken:
        another = hold_port(address)
        held.close()
        held = another
    return held


def _multislice_variables(member: Member, endpoint: Endpoint) -> dict[str, str | None]:
    """The variables by which libtpu finds the other slices: from the live worker group, in place of the
    Pod's. Only the port is the user's.
    """
    if member.num_slices <= 1:
        return dict.fromkeys(_MULTISLICE)
    address = member.slice_leaders[0] if member.slice_leaders else str(endpoint["address"])
    port = int(endpoint["multislice_port"])
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": join_address(address, port),
        "MEGASCALE_NUM_SLICES": str(member.num_slices),
        "MEGASCALE_SLICE_ID": str(member.slice_id),
        # Each process listens on its own: workers that share a host must not meet.
        "MEGASCALE_PORT": str(port + member.local_rank),
    }


def _around_proxies(address: str) -> dict[str, str | None]:
    """The group's own connections don't go through the user's HTTP proxy."""
    spared = next(filter(None, map(os.environ.get, ("no_grpc_proxy", "no_proxy"))), "")
    addresses = [part for part in spared.split(",") if part]
    return {"no_grpc_proxy": ",".join(dict.fromkeys([*addresses, address]))}


# Below: private names of JAX. Where a version lacks one, JAX's own default stays.


def _internal(name: str) -> Any:
    try:
        return importlib.import_module(f"jax._src.{name}")
    except ImportError:
        return None


def _keep_what_is_compiled() -> None:
    """Cache compiled programs on this machine, for the next attempt."""
    import jax

    folder = os.environ.get("EVERSTEP_CACHE")
    if folder and not jax.config.jax_compilation_cache_dir:
        _set_option("jax_compilation_cache_dir", folder)
        _set_option("jax_persistent_cache_min_compile_time_secs", 0.0)
        _set_option("jax_persistent_cache_min_entry_size_bytes", -1)


def _set_option(name: str, value: object) -> None:
    import jax

    with contextlib.suppress(AttributeError):
        jax.config.update(name, value)


def _recoverable() -> bool:
    import jax

    return bool(getattr(jax.config, "jax_enable_recoverability", False))


def _coordination_client() -> Any:
    state = getattr(_internal("distributed"), "global_state", None)
    return getattr(state, "client", None)


def _put_gloo_on(address: str) -> None:
    """Let gloo bind the address that the group meets at, not what this machine's name resolves to."""
    bridge, library = _internal("xla_bridge"), _internal("lib")
    make_collectives = getattr(getattr(library, "_jax", None), "make_gloo_tcp_collectives", None)
    if make_collectives is None or not hasattr(bridge, "make_cpu_client"):
        return

    def make_cpu_client() -> Any:
        import jax

        client = _coordination_client()
        if client is None or getattr(jax.config, "jax_cpu_collectives_implementation", None) != "gloo":
            return bridge.make_cpu_client()
        return bridge.make_cpu_client(
            collectives=make_collectives(distributed_client=client, hostname=address)
        )

    bridge.register_backend_factory("cpu", make_cpu_client, priority=0, fail_quietly=False)


@contextlib.contextmanager
def _sigterm_as_before() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


_ERRORS_ONLY, _FATAL_ONLY = 2, 3


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Without JAX's warning, at every start, that recoverability is experimental."""
    _set_log_level(_ERRORS_ONLY)
    try:
        yield
    finally:
        level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1")
        _set_log_level(int(level) if level.isdigit() else 1)


def _set_log_level(level: int) -> None:
    set_level = getattr(getattr(_internal("lib"), "utils", None), "absl_set_min_log_level", None)
    if set_level is not None:
        set_level(level)
