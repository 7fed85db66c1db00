"""What a training function learns of the checkpoints that it has reported."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import (
    Checkpoint,
    CheckpointConfig,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    report,
)


def fit(function: Any, tmp_path: Path, workers: int = 2, **run: Any) -> Result:
    scaling = ScalingConfig(num_workers=workers)
    return Trainer(
        function, scaling_config=scaling, run_config=RunConfig(storage_path=str(tmp_path), **run)
    ).fit()


def save(text: str) -> Checkpoint:
    folder = tempfile.mkdtemp()
    (Path(folder) / "weights").write_text(text)
    return Checkpoint.from_directory(folder)


def read(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    with checkpoint.as_directory() as folder:
        return (Path(folder) / "weights").read_text()


@pytest.mark.parametrize("mode", CheckpointConsistencyMode)
@pytest.mark.parametrize("upload", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_every_checkpoint_that_was_reported_is_listed(
    tmp_path: Path, mode: CheckpointConsistencyMode, upload: CheckpointUploadMode
) -> None:
    def function() -> list[int]:
        counts = []
        rank = get_context().get_world_rank()
        for step in range(10):
            checkpoint = save(str(step)) if rank == 0 else None
            report({"step": step}, checkpoint=checkpoint, checkpoint_upload_mode=upload)
            counts.append(len(get_all_reported_checkpoints(mode)))
        everstep.collective.barrier()
        return counts

    assert fit(function, tmp_path).return_value == list(range(1, 11))


def test_a_rank_that_saves_nothing_lists_what_the_others_save(tmp_path: Path) -> None:
    def function() -> None:
        rank = get_context().get_world_rank()
        report({"rank": rank}, checkpoint=save("0") if rank == 0 else None)
        (found,) = get_all_reported_checkpoints()
        assert found.metrics == {"rank": 0}
        assert read(found.checkpoint) == "0"

    fit(function, tmp_path, workers=3)


def test_the_list_is_in_ray_trains_order_the_best_last(tmp_path: Path) -> None:
    def function() -> list[float]:
        for score in (3.0, 5.0, 4.0, 1.0):
            report({"score": score}, checkpoint=save(str(score)))
        return [found.metrics["score"] for found in get_all_reported_checkpoints()]

    config = CheckpointConfig(checkpoint_score_attribute="score")
    assert fit(function, tmp_path, checkpoint_config=config).return_value == [1.0, 3.0, 4.0, 5.0]


def test_a_list_with_a_time_limit_has_what_is_committed_by_then(tmp_path: Path) -> None:
    def function() -> int | None:
        if get_context().get_world_rank() == 0:
            report({}, checkpoint=save("0"))
            count = len(get_all_reported_checkpoints(timeout_s=0.0))
            everstep.collective.barrier()
            return count
        everstep.collective.barrier()
        report({})
        return None

    assert fit(function, tmp_path).return_value == 0


def test_a_mode_that_is_none_is_refused(tmp_path: Path) -> None:
    def function() -> str:
        try:
            get_all_reported_checkpoints("COMMITTED")  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)
        return ""

    message = fit(function, tmp_path, workers=1).return_value
    assert "CheckpointConsistencyMode.COMMITTED" in message


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_checkpoint_to_get_follows_the_reports_on_every_rank(tmp_path: Path, workers: int) -> None:
    def function() -> list[str]:
        found = []
        assert get_checkpoint() is None
        for step in range(5):
            checkpoint = save(str(step)) if get_context().get_world_rank() == 0 else None
            report({"step": step}, checkpoint=checkpoint)
            report({"step": step})
            found.append(read(get_checkpoint()))
        assert found == [*"01234"]
        return found

    assert fit(function, tmp_path, workers=workers).return_value == [*"01234"]


def test_the_checkpoint_to_get_is_the_users_own_where_everstep_does_not_upload(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "weights").write_text("elsewhere")

    def function() -> str:
        report({}, Checkpoint(str(mine)), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        checkpoint = get_checkpoint()
        assert checkpoint is not None
        assert read(checkpoint) == "elsewhere"
        return checkpoint.path

    assert fit(function, tmp_path, workers=1).return_value == str(mine)


def test_without_workers_a_background_upload_is_listed_too(tmp_path: Path) -> None:
    def function() -> int:
        report({}, save("0"), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        return len(get_all_reported_checkpoints())

    assert fit(function, tmp_path, workers=0).return_value == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_score_that_no_report_has_is_said_once_with_the_names_that_there_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    def function() -> None:
        for step in range(3):
            report({"loss": 1.0, "step": step}, checkpoint=save(str(step)))

    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="los")
    fit(function, tmp_path, workers, checkpoint_config=config)
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "checkpoint_score_attribute" in line]
    assert "without a number 'los'" in told
    assert told.endswith("Its metrics: loss, step")
