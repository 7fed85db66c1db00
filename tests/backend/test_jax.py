"""The JAX backend, in forks of a warm template."""

from __future__ import annotations

import ipaddress
import os
import pickle
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import everstep.jax as train
from everstep import ScalingConfig
from everstep.backend.base import Backend, Member
from everstep.backend.jax import JaxBackend
from everstep.errors import ConfigError
from processes import LIMIT_S

from .harness import Outcome, Template, template

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax")

STALE = {
    "MEGASCALE_COORDINATOR_ADDRESS": "stale:1",
    "MEGASCALE_NUM_SLICES": "9",
    "MEGASCALE_SLICE_ID": "8",
    "MEGASCALE_PORT": "7",
}


@pytest.fixture(scope="module")
def warm() -> Iterator[Template]:
    with template("jax", **STALE, JAX_COORDINATOR_BIND_ADDRESS="stale:1") as forks:
        yield forks


def returned(outcomes: list[Outcome]) -> list[Any]:
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.log
    return [outcome.get("returned") for outcome in outcomes]


def is_echo(outcome: Outcome) -> bool:
    """An exception of a peer's death, or JAX's own last words about it: which comes first is chance."""
    return outcome.get("peer") is True or JaxBackend().is_peer_abort(outcome.signal, outcome.log)


@pytest.mark.parametrize("count", [5, pytest.param(30, marks=pytest.mark.soak)])
def test_groups_in_a_row_meet_and_leave_nothing_behind(warm: Template, count: int) -> None:
    for _ in range(count):
        outcomes = warm.run("one_step", world_size=4)
        assert returned(outcomes) == [10.0] * 4
        logs = [line for outcome in outcomes for line in outcome.log.splitlines()]
        assert [line for line in logs if not line.startswith("[Gloo]")] == []


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_an_echo_in_all_others(warm: Template, victim: int) -> None:
    outcomes = warm.run("step_forever", world_size=4, kill=victim)
    assert outcomes[victim].signal == signal.SIGKILL
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [is_echo(outcome) for outcome in survivors] == [True] * 3, [o.log for o in survivors]


def test_jax_ends_ranks_whose_leader_died_and_its_words_are_known(warm: Template) -> None:
    outcomes = warm.run("compute_forever", world_size=3, kill=0)
    assert [outcome.signal for outcome in outcomes] == [signal.SIGKILL, signal.SIGABRT, signal.SIGABRT]
    assert all(is_echo(outcome) for outcome in outcomes[1:]), outcomes[1].log


def test_a_users_own_error_is_no_echo_though_its_peers_fail_with_it(warm: Template) -> None:
    outcomes = warm.run("one_rank_errs", world_size=3)
    assert outcomes[1].get("peer") is False
    assert is_echo(outcomes[0])
    assert is_echo(outcomes[2])


def test_a_group_on_one_machine_listens_on_loopback_only(warm: Template) -> None:
    listening = returned(warm.run("listen", world_size=3))
    assert all(listening), "every rank of gloo listens"
    addresses = [ipaddress.ip_address(address) for rank in listening for address in rank]
    assert all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses)


def test_a_rank_may_work_on_after_the_leader_has_returned(warm: Template) -> None:
    returned(warm.run("leader_returns_first", world_size=3))


@pytest.mark.parametrize("absent", [0, 1])
def test_joining_without_a_peer_gives_up_at_the_deadline(warm: Template, absent: int) -> None:
    outcomes = warm.run("one_step", world_size=2, absent=[absent], join_s=0.5)
    assert outcomes[1 - absent].get("kind") == "TimeoutError", outcomes[1 - absent].log


def test_a_single_worker_is_a_distributed_job_as_well(warm: Template) -> None:
    assert returned(warm.run("devices", world_size=1)) == [[1, 1, 1]]
    assert returned(warm.run("one_step", world_size=1)) == [1.0]


def test_a_worker_has_as_many_cpu_devices_as_the_user_asked_for() -> None:
    with template("jax", JAX_NUM_CPU_DEVICES="2", JAX_PLATFORMS="cpu") as forks:
        assert returned(forks.run("devices", world_size=2)) == [[2, 4, 2]] * 2


def test_a_proxy_in_the_environment_does_not_come_between_the_workers() -> None:
    nobody = "http://127.0.0.1:9"
    with template("jax", http_proxy=nobody, https_proxy=nobody, no_proxy="example.org") as forks:
        outcomes = forks.run("one_step", world_size=2)
        assert returned(outcomes) == [3.0, 3.0]
        assert "proxy" not in outcomes[0].log
        environment, _ = returned(forks.run("environment", world_size=2))
        assert environment["no_grpc_proxy"] == "example.org,127.0.0.1"


def test_sigterm_still_ends_a_worker(warm: Template) -> None:
    assert returned(warm.run("sigterm", world_size=2)) == [True, True]


def test_what_is_stale_about_other_slices_is_removed_with_one_slice(warm: Template) -> None:
    for environment in returned(warm.run("environment", world_size=2)):
        assert not STALE.keys() & environment.keys()


def test_slices_are_told_of_each_other_whatever_the_environment_said(warm: Template) -> None:
    place = {"num_slices": 2, "slice_id": 1, "slice_leaders": ["127.0.0.1", "127.0.0.1"]}
    first, second = warm.run("environment", world_size=2, member=place)
    endpoint = first.get("endpoint")
    port = endpoint["multislice_port"]
    assert port == 7, "the user's"
    assert port != endpoint["port"]
    for rank, environment in enumerate(returned([first, second])):
        assert environment["MEGASCALE_COORDINATOR_ADDRESS"] == f"127.0.0.1:{port}"
        assert environment["MEGASCALE_NUM_SLICES"] == "2"
        assert environment["MEGASCALE_SLICE_ID"] == "1"
        assert environment["MEGASCALE_PORT"] == str(port + rank)


def test_slices_meet_at_a_port_that_a_firewall_can_know() -> None:
    with template("jax") as forks:
        place = {"num_slices": 2, "slice_id": 0, "slice_leaders": ["127.0.0.1", "127.0.0.1"]}
        environments = returned(forks.run("environment", world_size=2, member=place))
    assert [e["MEGASCALE_PORT"] for e in environments] == ["8081", "8082"]
    assert environments[1]["MEGASCALE_COORDINATOR_ADDRESS"] == "127.0.0.1:8081"


@pytest.mark.parametrize("given", ["eight", "0", "65536"])
def test_a_port_for_slices_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("MEGASCALE_PORT", given)
    with pytest.raises(ConfigError, match=f"MEGASCALE_PORT is '{given}'"):
        JaxBackend().host(Member(0, 2, 0, 1, 0, 2, slice_id=0, num_slices=2, bind_address="127.0.0.1"))


def test_the_probe_finishes_in_a_fork_of_a_template_that_only_imported(warm: Template) -> None:
    assert warm.ask(job="probe", patience_s=LIMIT_S)["finished"]


def test_the_probe_hangs_in_a_fork_of_a_template_that_computed() -> None:
    with template("jax", JAX_PLATFORMS="cpu") as spoilt:
        spoilt.ask(job="spoil")
        assert not spoilt.ask(job="probe", patience_s=1)["finished"]


def test_a_worker_sees_its_own_accelerators_only() -> None:
    backend = JaxBackend()
    gpu = Member(1, 2, 1, 2, 0, 1, devices=("1",), device_kind="gpu")
    assert backend.environment(gpu)["CUDA_VISIBLE_DEVICES"] == "1"
    part = backend.environment(Member(1, 2, 1, 2, 0, 1, devices=("2", "3"), device_kind="tpu"))
    assert part["TPU_VISIBLE_CHIPS"] == "2,3"
    assert part["TPU_CHIPS_PER_HOST_BOUNDS"] == "1,2,1"
    whole = backend.environment(Member(0, 1, 0, 1, 0, 1, devices=("0", "1", "2", "3"), device_kind="tpu"))
    assert whole["TPU_VISIBLE_CHIPS"] is None


def test_the_platform_is_what_the_worker_has_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tpu = Member(0, 1, 0, 1, 0, 1, devices=("0",), device_kind="tpu")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert JaxBackend().environment(tpu)["JAX_PLATFORMS"] == "tpu"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS" not in JaxBackend().environment(tpu)


def test_a_backend_travels_with_its_config_and_nothing_else() -> None:
    backend = JaxBackend(train.JaxConfig(use_gpu=True))
    assert isinstance(backend, Backend)
    backend.host(Member(0, 1, 0, 1, 0, 1))
    assert pickle.loads(pickle.dumps(backend)).config == train.JaxConfig(use_gpu=True)


def test_a_port_that_is_held_goes_to_nobody_else_and_to_the_server_that_shares() -> None:
    import socket

    from everstep.backend.network import hold_port

    with hold_port("127.0.0.1") as held:
        address = held.getsockname()
        with socket.socket() as stranger, pytest.raises(OSError, match=os.strerror(98)):
            stranger.bind(address)
        with socket.socket() as coordinator:
            coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            coordinator.bind(address)
            coordinator.listen()
            with socket.create_connection(address):
                assert coordinator.accept()[0].close() is None


@pytest.mark.parametrize(
    ("message", "echo"),
    [
        ("UNAVAILABLE: Failed to send RPC to coordination service. Socket closed", True),
        ("DEADLINE_EXCEEDED: Barrier timed out. Id: 3", True),
        ("INTERNAL: NCCL operation failed: remote process exited or there was a network error", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes", False),
        ("INVALID_ARGUMENT: Argument does not match host shape or layout of computation parameter 0", False),
        ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", False),
    ],
)
def test_an_error_of_jax_is_an_echo_only_where_it_speaks_of_peers(message: str, echo: bool) -> None:
    import jax

    assert JaxBackend().is_peer_failure(jax.errors.JaxRuntimeError(message)) is echo
    assert not JaxBackend().is_peer_failure(RuntimeError(message))


def test_an_abort_without_the_last_words_of_jax_is_a_cause() -> None:
    assert not JaxBackend().is_peer_abort(signal.SIGABRT, "free(): invalid pointer")
    assert not JaxBackend().is_peer_abort(None, "the JAX distributed service detected fatal errors")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"use_tpu": 1}, "JaxConfig.use_tpu"),
        ({"use_tpu": True, "use_gpu": True}, "JaxConfig.use_gpu"),
        ({"use_tpus": True}, "JaxConfig.use_tpus"),
    ],
)
def test_a_wrong_config_is_refused_by_the_name_of_its_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train.JaxConfig(**wrong)
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_trainer_takes_its_config_from_the_scaling_config() -> None:
    scaling = ScalingConfig(num_workers=1, use_gpu=True)
    backend = train.JaxTrainer(lambda: None, scaling_config=scaling).backend()
    assert isinstance(backend, JaxBackend)
    assert backend.config == train.JaxConfig(use_gpu=True)
    with pytest.raises(ConfigError, match="ScalingConfig"):
        train.JaxTrainer(lambda: None, jax_config=train.JaxConfig(use_tpu=True))
    with pytest.raises(ConfigError, match="jax_config"):
        train.JaxTrainer(lambda: None, backend_config=backend)
