"""Bad input: an error that names the field and the remedy, before anything starts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from everstep import (
    ConfigError,
    FailureConfig,
    FunctionLoadError,
    InfeasibleResourcesError,
    RunConfig,
    ScalingConfig,
    StorageAccessError,
    Trainer,
)
from everstep.testing import LocalCluster
from processes import ours


def nothing() -> None:
    pass


def read_config(config: dict[str, Any]) -> object:
    return config["self"][0]["lr"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ScalingConfig(num_workers=-1), "num_workers"),
        (lambda: ScalingConfig(num_workers=(4, 2)), "num_workers"),
        (lambda: ScalingConfig(number_of_workers=2), "num_workers"),
        (lambda: FailureConfig(max_failures=-2), "max_failures"),
        (lambda: RunConfig(name="a/b"), "name"),
        (lambda: Trainer(lambda a, b: None), "nothing or the config dict"),
    ],
)
def test_a_bad_config_is_refused_when_it_is_made(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=says):
        make()


def test_an_unpicklable_function_is_refused_and_the_object_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def uses_lock() -> None:
        lock.acquire()

    with pytest.raises(FunctionLoadError, match="'lock', a _thread.lock"):
        Trainer(uses_lock, run_config=RunConfig(storage_path=str(tmp_path))).fit()
    assert not ours()


def test_an_unpicklable_config_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(FunctionLoadError, match="train_loop_config\\['lock'\\]"):
        Trainer(
            lambda config: None,
            train_loop_config={"lock": threading.Lock()},
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()


def test_a_config_that_contains_itself_runs_and_is_the_same_the_next_time(tmp_path: Path) -> None:
    def fit() -> object:
        config: dict[str, object] = {"lr": 0.1}
        config["self"] = [config]
        run = RunConfig(storage_path=str(tmp_path), name="run")
        return Trainer(read_config, train_loop_config=config, run_config=run).fit().return_value

    assert fit() == fit() == 0.1


def test_local_functions_that_call_each_other_can_be_trained(tmp_path: Path) -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    run = RunConfig(storage_path=str(tmp_path))
    assert Trainer(lambda: even(4), run_config=run).fit().return_value is True


@pytest.mark.parametrize("resources", [{"CPU": 1000}, {"unobtainium": 1}])
def test_resources_that_the_machine_does_not_have_are_refused(
    tmp_path: Path, resources: dict[str, float]
) -> None:
    with pytest.raises(InfeasibleResourcesError, match="this machine has"):
        Trainer(
            nothing,
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker=resources),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()


def test_more_workers_than_the_kernel_has_room_for_are_refused(tmp_path: Path) -> None:
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    with pytest.raises(InfeasibleResourcesError, match=f"{most + 1} workers on this machine, which has room"):
        Trainer(
            nothing,
            scaling_config=ScalingConfig(num_workers=most + 1),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()


def test_a_gpu_where_there_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.engine.local.machine import visible_gpus

    visible_gpus.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InfeasibleResourcesError, match="GPU"):
        Trainer(
            nothing,
            scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
    visible_gpus.cache_clear()


def test_a_storage_path_that_can_not_be_written_is_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageAccessError, match="storage_path"):
        Trainer(nothing, run_config=RunConfig(storage_path=str(tmp_path / "file"))).fit()


def test_workers_that_do_not_fill_whole_slices_are_refused_with_the_nearest_numbers(tmp_path: Path) -> None:
    with (
        LocalCluster(slices=1, hosts_per_slice=2) as cluster,
        pytest.raises(InfeasibleResourcesError, match="2 or 4"),
    ):
        Trainer(
            nothing,
            scaling_config=ScalingConfig(num_workers=3),
            run_config=RunConfig(storage_path=str(tmp_path)),
            engine=cluster,
        ).fit()


def test_a_function_that_can_not_be_loaded_on_the_worker_is_never_retried(tmp_path: Path) -> None:
    class Treacherous:
        """Pickles, and fails to come back."""

        def __reduce__(self) -> tuple[object, ...]:
            return (__import__, ("a_module_that_is_not_there",))

    trap = Treacherous()

    def function() -> object:
        return trap

    with pytest.raises(FunctionLoadError, match="a_module_that_is_not_there"):
        Trainer(
            function,
            run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=-1)),
        ).fit()
