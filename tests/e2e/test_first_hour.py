"""What a first hour runs into: each has its cause in one line, and ends by itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from everstep import (
    ControllerError,
    Deadlines,
    FailureConfig,
    FunctionLoadError,
    RunConfig,
    ScalingConfig,
    Trainer,
    WorkerGroupError,
)
from everstep.backend.base import Endpoint, Member, NoBackend
from everstep.torch import TorchTrainer

AT_ONCE = Deadlines(backoff_first_s=0, backoff_max_s=0)


class NeedsWhatIsNotThere(NoBackend):
    def preload(self) -> tuple[str, ...]:
        return ("no_such_framework", "no_such_framework.distributed")


class CannotJoin(NoBackend):
    """Leaves a line for each try. Its error differs in numbers only: ports and pids do."""

    def __init__(self, tries: Path) -> None:
        self._tries = tries

    def join(self, member: Member, endpoint: Endpoint, timeout_s: float) -> None:
        with self._tries.open("a") as out:
            out.write("tried\n")
        raise ConnectionRefusedError(f"no answer from the leader at port {random.randrange(1 << 16)}")


def train() -> None:
    """A training function."""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_framework_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, workers: int
) -> None:
    trainer = Trainer(
        train,
        backend_config=NeedsWhatIsNotThere(),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
    )
    with pytest.raises(FunctionLoadError, match="need no_such_framework, which isn't installed") as caught:
        trainer.fit()
    assert "\n" not in str(caught.value)
    assert "pip install" in caught.value.remedy
    assert not (tmp_path / "runs").exists()


def test_a_framework_that_is_missing_where_the_workers_run_is_named_and_nothing_is_retried(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "work" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object')")
    trainer = TorchTrainer(
        train,
        run_config=RunConfig(
            storage_path=str(tmp_path / "runs"),
            worker_runtime_env={"working_dir": str(tmp_path / "work")},
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),
        ),
    )
    with pytest.raises(FunctionLoadError, match=r"torch can't be imported: .*libtorch_cpu\.so") as caught:
        trainer.fit()
    assert "torch" in str(caught.value).splitlines()[0]


def test_a_start_that_fails_in_the_same_way_again_and_again_ends_with_its_cause(tmp_path: Path) -> None:
    trainer = Trainer(
        train,
        backend_config=CannotJoin(tmp_path / "tries"),
        run_config=RunConfig(
            storage_path=str(tmp_path / "runs"),
            deadlines=AT_ONCE,
            failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),
        ),
    )
    with pytest.raises(ControllerError, match="no answer from the leader at port") as caught:
        trainer.fit()
    assert (tmp_path / "tries").read_text().splitlines() == ["tried"] * AT_ONCE.first_start_attempts
    assert "Traceback of rank 0" in str(caught.value)


def test_a_spent_controller_failure_limit_is_a_controller_error_that_shows_the_first_cause(
    tmp_path: Path,
) -> None:
    trainer = Trainer(
        train,
        backend_config=CannotJoin(tmp_path / "tries"),
        run_config=RunConfig(
            storage_path=str(tmp_path / "runs"),
            deadlines=AT_ONCE,
            failure_config=FailureConfig(controller_failure_limit=1),
        ),
    )
    with pytest.raises(ControllerError, match="controller_failure_limit=1") as caught:
        trainer.fit()
    assert "rank 0" in str(caught.value).splitlines()[0]
    failure = caught.value.controller_failure
    assert isinstance(failure, WorkerGroupError)
    assert "ConnectionRefusedError" in failure.worker_failures[0].traceback
