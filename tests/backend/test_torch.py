"""The torch backend, and what ``everstep.torch`` offers a training function, in forks of a warm template."""

from __future__ import annotations

import ipaddress
import os
import pickle
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import everstep.torch as train
from everstep.backend.base import Backend, Member
from everstep.backend.torch import TorchBackend
from everstep.errors import ConfigError, RefusedError
from processes import LIMIT_S

from .harness import Outcome, Template, pretend_session, template

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

GPU = Member(
    3,
    4,
    1,
    2,
    1,
    2,
    group_rank=3,
    group_size=4,
    bind_address="127.0.0.1",
    devices=("6", "7"),
    device_kind="gpu",
)


@pytest.fixture(scope="module")
def warm() -> Iterator[Template]:
    with template("torch", MASTER_PORT="1", TORCHELASTIC_ERROR_FILE="stale") as forks:
        yield forks


def returned(outcomes: list[Outcome]) -> list[Any]:
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.log
    return [outcome.get("returned") for outcome in outcomes]


@pytest.mark.parametrize("count", [5, pytest.param(30, marks=pytest.mark.soak)])
def test_groups_in_a_row_meet_and_leave_nothing_behind(warm: Template, count: int) -> None:
    for _ in range(count):
        outcomes = warm.run("one_step", world_size=4)
        assert returned(outcomes) == [10.0] * 4
        assert [outcome.log for outcome in outcomes] == [""] * 4


def test_a_single_worker_has_a_group_of_its_own(warm: Template) -> None:
    assert returned(warm.run("one_step", world_size=1)) == [1.0]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_an_echo_in_all_others(warm: Template, victim: int) -> None:
    outcomes = warm.run("step_forever", world_size=4, kill=victim)
    assert outcomes[victim].signal == 9
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [outcome.get("peer") for outcome in survivors] == [True] * 3, [o.log for o in survivors]


def test_a_users_own_error_is_no_echo_though_its_peers_fail_with_it(warm: Template) -> None:
    outcomes = warm.run("one_rank_errs", world_size=3)
    assert [outcome.get("peer") for outcome in outcomes] == [True, False, True]


def test_ranks_that_call_different_collectives_have_a_cause_not_only_echoes(warm: Template) -> None:
    outcomes = warm.run("ranks_disagree", world_size=2)
    assert not all(outcome.get("peer") for outcome in outcomes)  # gloo aborts one of the two


def test_a_group_on_one_machine_listens_on_loopback_only(warm: Template) -> None:
    listening = returned(warm.run("listen", world_size=3))
    assert all(listening), "every rank of gloo listens"
    assert all(ipaddress.ip_address(address).is_loopback for rank in listening for address in rank)


def test_a_rank_may_work_on_after_the_leader_has_returned(warm: Template) -> None:
    returned(warm.run("leader_returns_first", world_size=3))


def test_leaving_after_the_leader_died_is_quiet(warm: Template) -> None:
    outcomes = warm.run("leave_without_peers", world_size=3, kill=0)
    assert [outcome.exit_code for outcome in outcomes[1:]] == [0, 0]
    for outcome in outcomes[1:]:  # torch's store warns; nothing is an error
        assert "Traceback" not in outcome.log
        assert "[E" not in outcome.log


@pytest.mark.parametrize("absent", [0, 1])
def test_joining_without_a_peer_gives_up_at_the_deadline(warm: Template, absent: int) -> None:
    outcomes = warm.run("one_step", world_size=2, absent=[absent], join_s=0.5)
    assert outcomes[1 - absent].get("raised")
    assert outcomes[1 - absent].get("peer") is True


def test_the_environment_is_that_of_torchrun(warm: Template) -> None:
    environments = returned(warm.run("environment", world_size=2))
    for rank, environment in enumerate(environments):
        expected = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        assert {name: int(environment[name]) for name in expected} == expected
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert "TORCHELASTIC_ERROR_FILE" not in environment
    ports = {environment["MASTER_PORT"] for environment in environments}
    assert len(ports) == 1
    assert ports != {"1"}


def test_a_group_made_anew_over_the_environment_works(warm: Template) -> None:
    assert returned(warm.run("group_over_env", world_size=3)) == [6.0] * 3


def test_forked_ranks_draw_different_numbers(warm: Template) -> None:
    drawn = returned(warm.run("draw", world_size=3))
    assert len({tuple(numbers) for numbers in drawn}) == 3


def test_the_loaders_of_all_ranks_draw_different_numbers(warm: Template) -> None:
    numbers = [number for rank in returned(warm.run("loader_seeds", world_size=2)) for number in rank]
    assert len(numbers) == 2 * 4 * 3
    assert len(set(numbers)) == len(numbers)


def test_reproducible_loaders_differ_between_ranks_and_not_between_runs(warm: Template) -> None:
    first = returned(warm.run("loader_seeds", world_size=2, reproducible=True))
    second = returned(warm.run("loader_seeds", world_size=2, reproducible=True))
    assert first == second
    assert not set(first[0]) & set(first[1])


def test_data_parallel_ranks_share_the_data_and_end_with_one_model(warm: Template) -> None:
    results = returned(warm.run("data_parallel", world_size=2))
    assert {result["kind"] for result in results} == {"DistributedDataParallel"}
    assert results[0]["weights"] == results[1]["weights"]
    assert sorted(results[0]["seen"] + results[1]["seen"]) == [float(number) for number in range(16)]
    assert results[0]["seen"] != sorted(results[0]["seen"]), "it was shuffled"


def test_sigterm_still_ends_a_worker(warm: Template) -> None:
    assert returned(warm.run("sigterm", world_size=1)) == [True]


def test_the_probe_finishes_in_a_fork_of_a_template_that_only_imported(warm: Template) -> None:
    assert warm.ask(job="probe", patience_s=LIMIT_S)["finished"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no pool of threads to lose")
def test_the_probe_hangs_in_a_fork_of_a_template_that_computed() -> None:
    with template("torch") as spoilt:
        spoilt.ask(job="spoil")
        assert not spoilt.ask(job="probe", patience_s=1)["finished"]


def test_a_worker_sees_its_own_gpus_only() -> None:
    environment = TorchBackend().environment(GPU)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert environment["ACCELERATE_TORCH_DEVICE"] == "cuda:0"
    assert TorchBackend().environment(Member(0, 1, 0, 1, 0, 1))["CUDA_VISIBLE_DEVICES"] == ""


def test_an_interface_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in TorchBackend().environment(GPU)


def test_a_backend_travels_with_its_config_and_nothing_else() -> None:
    backend = TorchBackend(train.TorchConfig(timeout_s=7))
    assert isinstance(backend, Backend)
    backend.host(Member(0, 1, 0, 1, 0, 1))
    assert pickle.loads(pickle.dumps(backend)).config == train.TorchConfig(timeout_s=7)


def test_an_echo_that_the_user_wrapped_is_one_still() -> None:
    import torch.distributed as dist

    backend = TorchBackend()
    try:
        raise ValueError("step 3 failed") from dist.DistNetworkError("failed to recv, got 0 bytes")
    except ValueError as error:
        assert backend.is_peer_failure(error)
    assert not backend.is_peer_failure(dist.DistBackendError("NCCL error: ncclInvalidUsage, Duplicate GPU"))
    assert not backend.is_peer_failure(ConnectionResetError("my database: Connection reset by peer"))
    assert not backend.is_peer_failure(RuntimeError("my service: Connection reset by peer"))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"backend": ""}, "TorchConfig.backend"),
        ({"init_method": "file"}, "TorchConfig.init_method"),
        ({"timeout_s": 0}, "TorchConfig.timeout_s"),
        ({"timeout_s": "1"}, "TorchConfig.timeout_s"),
        ({"time_out_s": 1}, "TorchConfig.time_out_s"),
    ],
)
def test_a_wrong_config_is_refused_by_the_name_of_its_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train.TorchConfig(**wrong)
    assert caught.value.field == field
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["accelerate", "backward", "prepare_optimizer", "TorchCheckpoint"])
def test_what_is_not_there_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        getattr(train, name)()
    assert caught.value.remedy


def test_a_trainer_takes_its_own_config_and_no_backend() -> None:
    config = train.TorchConfig(backend="gloo")
    backend = train.TorchTrainer(lambda: None, torch_config=config).backend()
    assert isinstance(backend, TorchBackend)
    assert backend.config == config
    with pytest.raises(ConfigError, match="torch_config"):
        train.TorchTrainer(lambda: None, backend_config=backend)
    with pytest.raises(ConfigError, match="TorchConfig"):
        train.TorchTrainer(lambda: None, torch_config={"backend": "gloo"})  # type: ignore[arg-type]


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "everstep.training", None)  # what comes after is undone with it
    pretend_session(rank=1, world_size=2)


@pytest.mark.usefixtures("second_of_two")
def test_a_divided_loader_keeps_what_the_user_asked_of_it() -> None:
    from torch.utils.data import DataLoader, DistributedSampler

    loader = DataLoader(range(10), batch_size=2, drop_last=True, num_workers=1, prefetch_factor=5)
    divided = train.prepare_data_loader(loader, move_to_device=False)
    assert isinstance(divided.sampler, DistributedSampler)
    assert (divided.batch_size, divided.drop_last, divided.num_workers) == (2, True, 1)
    assert divided.prefetch_factor == 5
    assert not divided.sampler.shuffle
    assert train.prepare_data_loader(loader, add_dist_sampler=False, move_to_device=False) is loader


@pytest.mark.usefixtures("second_of_two")
def test_a_loader_on_a_device_is_a_loader_still() -> None:
    import torch
    from torch.utils.data import DataLoader

    class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield {"x": torch.ones(2), "nested": (torch.zeros(1), ["a", 3])}

    loader = train.prepare_data_loader(DataLoader(Batches(), batch_size=None))
    assert isinstance(loader, DataLoader)
    for _ in range(2):  # more than one epoch
        (batch,) = loader
        assert batch["x"].tolist() == [1, 1]
        assert batch["nested"][1] == ["a", 3]


@pytest.mark.usefixtures("second_of_two")
def test_a_loader_that_cannot_be_divided_says_what_to_do() -> None:
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    batches = BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)
    with pytest.raises(ConfigError, match="add_dist_sampler=False"):
        train.prepare_data_loader(DataLoader(range(4), batch_sampler=batches))


@pytest.mark.usefixtures("second_of_two")
def test_an_unknown_way_to_be_parallel_is_refused() -> None:
    import torch

    with pytest.raises(ConfigError, match="ddp"):
        train.prepare_model(torch.nn.Linear(1, 1), parallel_strategy="zero")
