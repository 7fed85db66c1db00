"""A function of the user's validates checkpoints beside training: real processes, killed and kept waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import (
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    FailureConfig,
    ReportedCheckpointStatus as Status,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    ValidationConfig,
    ValidationTaskConfig,
    get_all_reported_checkpoints,
    get_context,
    report,
)
from everstep.errors import ConfigError, FunctionLoadError, WorkerGroupError
from everstep.journal.history import read_history
from everstep.storage.store import open_store
from processes import LIMIT_S, wait_for

from .test_reported_checkpoints import read, save


def loss_of(checkpoint: Checkpoint, scale: float = 1.0, plus: float = 0.0) -> dict[str, Any]:
    return {"loss": float(read(checkpoint)) * scale + plus}


def fit(function: Any, tmp_path: Path, fn: Any = loss_of, workers: int = 2, **more: Any) -> Result:
    checkpoints = more.pop("checkpoints", None)
    config = ValidationConfig(fn, **more.pop("validation", {}))
    run = RunConfig(name="run", storage_path=str(tmp_path), checkpoint_config=checkpoints, **more)
    scaling = ScalingConfig(num_workers=workers)
    return Trainer(function, scaling_config=scaling, run_config=run, validation_config=config).fit()


def statuses(tmp_path: Path) -> list[Status]:
    return [kept.status for kept in read_history(open_store(str(tmp_path / "run"))).in_order()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("upload", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_what_a_validation_finds_is_added_to_the_checkpoints_metrics(
    tmp_path: Path, workers: int, upload: CheckpointUploadMode
) -> None:
    def train() -> list[Any]:
        for step in range(3):
            mine = save(str(step)) if get_context().get_world_rank() == 0 else None
            report(
                {"step": step}, mine, checkpoint_upload_mode=upload, validation=step > 0 and mine is not None
            )
        return [(found.metrics, found.status.value) for found in get_all_reported_checkpoints()]

    result = fit(train, tmp_path, workers=workers)
    assert result.return_value == [
        ({"step": 0}, "COMMITTED"),
        ({"step": 1, "loss": 1.0}, "VALIDATED"),
        ({"step": 2, "loss": 2.0}, "VALIDATED"),
    ]
    assert result.metrics == {"step": 2, "loss": 2.0}
    assert [metrics for _, metrics in result.best_checkpoints][-1] == {"step": 2, "loss": 2.0}
    assert Result.from_path(result.path).best_checkpoints[-1][1] == {"step": 2, "loss": 2.0}


@pytest.mark.parametrize("workers", [0, 1])
def test_arguments_of_a_report_come_before_those_of_the_trainer(tmp_path: Path, workers: int) -> None:
    def train() -> None:
        report({}, save("1"), validation=True)
        report({}, save("1"), validation=ValidationTaskConfig(fn_kwargs={"plus": 0.5}))

    defaults = ValidationTaskConfig(fn_kwargs={"scale": 3.0, "plus": 1.0})
    result = fit(train, tmp_path, workers=workers, validation={"task_config": defaults})
    assert [metrics["loss"] for _, metrics in result.best_checkpoints] == [4.0, 3.5]


def test_retention_goes_by_what_validations_find_and_waits_for_them(tmp_path: Path) -> None:
    """The first is the best, which nobody knows before all four are committed."""
    let_go = tmp_path / "let go"

    def slowly(checkpoint: Checkpoint) -> dict[str, Any]:
        while not let_go.exists():
            time.sleep(0.01)
        return loss_of(checkpoint)

    def train() -> int:
        for step in (1, 4, 3, 2):
            report({"step": step}, save(str(step)), validation=True)
        found = get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
        assert [one.status.value for one in found] == ["PENDING_VALIDATION"] * 4
        assert len(get_all_reported_checkpoints(timeout_s=0.1)) == 4, "as it is after the limit"
        let_go.touch()
        return len(get_all_reported_checkpoints())

    best = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    result = fit(train, tmp_path, slowly, workers=1, checkpoints=best)
    assert result.return_value == 2, "the best and the newest"
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [2, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_validation_that_fails_is_told_and_costs_nothing_else(
    tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(checkpoint: Checkpoint) -> Any:
        print("what it printed")
        if read(checkpoint) == "1":
            raise ValueError("no such data")
        return [1]

    def train() -> None:
        report({}, save("1"), validation=True)
        report({}, save("2"), validation=True)

    result = fit(train, tmp_path, fails, workers=workers)
    assert result.error is None
    assert statuses(tmp_path) == [Status.VALIDATION_FAILED] * 2
    told = capfd.readouterr().err
    assert "failed: ValueError: no such data" in told
    assert "returned a list" in told
    if workers:
        log = (tmp_path / "run" / "logs" / "validation.log").read_text()
        assert "what it printed" in log
        assert "ValueError: no such data" in log


def test_a_validation_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    def sleeps(checkpoint: Checkpoint) -> dict[str, Any]:
        os.fork()
        time.sleep(3600)
        return {}

    def train() -> None:
        report({}, save("1"), validation=ValidationTaskConfig(timeout_s=1.0))

    fit(train, tmp_path, sleeps, workers=1)  # that nothing is left running is looked at after every test
    assert statuses(tmp_path) == [Status.VALIDATION_TIMEOUT]


def test_a_validation_whose_process_is_killed_is_tried_again(tmp_path: Path) -> None:
    died = tmp_path / "died"

    def dies_once(checkpoint: Checkpoint) -> dict[str, Any]:
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_of(checkpoint)

    def train() -> None:
        report({}, save("1"), validation=True)

    result = fit(train, tmp_path, dies_once, workers=1)
    assert statuses(tmp_path) == [Status.VALIDATED]
    assert result.metrics == {"loss": 1.0}


def test_what_an_earlier_driver_left_is_validated_by_the_next(tmp_path: Path) -> None:
    def train() -> None:
        checkpoint = everstep.get_checkpoint()
        if checkpoint is None:
            report({}, save("7"), validation=True)
            raise KeyError("once")

    def kills_its_driver(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"by": "the next"}

    def hangs(checkpoint: Checkpoint) -> dict[str, Any]:
        threading.Event().wait()
        return {}

    with pytest.raises(WorkerGroupError):
        fit(train, tmp_path, hangs, workers=1)
    assert statuses(tmp_path) == [Status.PENDING_VALIDATION]
    fit(train, tmp_path, kills_its_driver, workers=1)
    history = read_history(open_store(str(tmp_path / "run")))
    assert [kept.metrics for kept in history.in_order()] == [{"by": "the next"}]


def test_what_waits_for_a_function_that_is_no_longer_given_is_said_and_holds_up_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        if everstep.get_checkpoint() is None:
            report({}, save("7"), validation=True)
            raise KeyError("once")

    def hangs(checkpoint: Checkpoint) -> dict[str, Any]:
        threading.Event().wait()
        return {}

    with pytest.raises(WorkerGroupError):
        fit(train, tmp_path, hangs, workers=1)
    Trainer(train, run_config=RunConfig(name="run", storage_path=str(tmp_path))).fit()
    assert "validation_config=…) is no longer given" in capfd.readouterr().err
    assert statuses(tmp_path) == [Status.COMMITTED]


SCRIPT = """
import sys, time
from pathlib import Path
import everstep
from everstep import Checkpoint, RunConfig, Trainer, ValidationConfig, report
from e2e.test_reported_checkpoints import save

def train():
    if everstep.get_checkpoint() is None:
        report({}, save("7"), validation=True)

def validate(checkpoint):
    with Path(sys.argv[2]).open("a") as began:
        began.write("once\\n")
    while not Path(sys.argv[2] + ".go").exists():
        time.sleep(0.01)
    return {"loss": 1.0}

if __name__ == "__main__":
    Trainer(train, run_config=RunConfig(name="run", storage_path=sys.argv[1]),
            validation_config=ValidationConfig(validate)).fit()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_while_it_validates_leaves_it_for_the_next(
    tmp_path: Path, number: signal.Signals
) -> None:
    script, began = tmp_path / "script.py", tmp_path / "began"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "runs"), str(began)]
    driver = subprocess.Popen(command, start_new_session=True)
    wait_for(began.exists, "a validation")
    driver.send_signal(number)
    driver.wait(LIMIT_S)
    assert statuses(tmp_path / "runs") == [Status.PENDING_VALIDATION]
    (tmp_path / "began.go").touch()
    again = subprocess.run(command, timeout=120, check=False)
    assert again.returncode == 0
    assert statuses(tmp_path / "runs") == [Status.VALIDATED]


def test_a_validation_that_nobody_can_make_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    def train() -> None:
        report({}, save("1"), validation=True)

    trainer = Trainer(train, run_config=RunConfig(storage_path=str(tmp_path)))
    with pytest.raises(WorkerGroupError, match="validation_config=everstep.ValidationConfig"):
        trainer.fit()


def test_a_validation_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    def train() -> None:
        report({}, validation=True)

    with pytest.raises(WorkerGroupError, match="there is nothing to validate"):
        fit(train, tmp_path, workers=1)


def test_a_function_that_can_not_travel_is_refused_before_anything_starts(tmp_path: Path) -> None:
    lock = threading.Lock()

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        with lock:
            return {}

    with pytest.raises(FunctionLoadError, match="ValidationConfig.fn can't be pickled"):
        fit(lambda: None, tmp_path, validate, workers=1)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ValidationConfig(3), "ValidationConfig.fn is 3"),  # type: ignore[arg-type]
        (lambda: ValidationConfig(loss_of, {"a": 1}), "task_config is a dict"),  # type: ignore[arg-type]
        (lambda: ValidationTaskConfig(timeout_s=0), "timeout_s is 0"),
        (lambda: ValidationTaskConfig(timeout_s=float("nan")), "timeout_s is nan"),
        (lambda: ValidationTaskConfig({"a": {1, 2}}), "fn_kwargs can't be kept"),
        (lambda: ValidationTaskConfig({1: 2}), "fn_kwargs can't be kept"),  # type: ignore[dict-item]
        (lambda: Trainer(print, validation_config=loss_of), "validation_config is a"),  # type: ignore[arg-type]
    ],
)
def test_mistaken_configs_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_workers_that_fail_meanwhile_cost_no_validation(tmp_path: Path) -> None:
    failed = tmp_path / "failed"

    def train() -> None:
        checkpoint = everstep.get_checkpoint()
        step = int(read(checkpoint)) if checkpoint is not None else 0
        while step < 4:
            step += 1
            report({"step": step}, save(str(step)), validation=True)
            if step == 2 and not failed.exists():
                failed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    result = fit(train, tmp_path, workers=1, failure_config=FailureConfig(max_failures=1))
    assert [metrics["loss"] for _, metrics in result.best_checkpoints] == [1.0, 2.0, 3.0, 4.0]
