"""Uploads by the user's own function, and where it finds the run's folder."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import (
    Checkpoint,
    CheckpointUploadMode,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    get_all_reported_checkpoints,
    get_context,
    report,
)
from processes import LIMIT_S

ASYNC, SYNC = CheckpointUploadMode.ASYNC, CheckpointUploadMode.SYNC


def fit(function: Any, tmp_path: Path, workers: int = 2, **run: Any) -> Result:
    scaling = ScalingConfig(num_workers=workers)
    return Trainer(
        function, scaling_config=scaling, run_config=RunConfig(storage_path=str(tmp_path), **run)
    ).fit()


def save(text: str) -> Checkpoint:
    folder = tempfile.mkdtemp()
    (Path(folder) / "weights").write_text(text)
    return Checkpoint.from_directory(folder)


def into_the_run(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """As in Ray Train's guide."""
    path = get_context().get_storage().build_checkpoint_path_from_name(name)
    shutil.copytree(checkpoint.path, path, dirs_exist_ok=True)
    return Checkpoint(path)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_uploads_to_the_path_that_the_storage_context_builds(
    tmp_path: Path, mode: CheckpointUploadMode, workers: int
) -> None:
    def function() -> None:
        for step in range(3):
            saved = save(str(step)) if get_context().get_world_rank() == 0 else None
            report({"step": step}, saved, checkpoint_upload_mode=mode, checkpoint_upload_fn=into_the_run)

    result = fit(function, tmp_path, workers, name="mine")
    texts = [(Path(checkpoint.path) / "weights").read_text() for checkpoint, _ in result.best_checkpoints]
    assert texts == ["0", "1", "2"]
    assert {Path(checkpoint.path).parent for checkpoint, _ in result.best_checkpoints} == {tmp_path / "mine"}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_asynchronous_upload_function_runs_behind_the_training_functions_back(
    tmp_path: Path, workers: int
) -> None:
    def function() -> bool:
        returned, upload_thread = threading.Event(), []

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            upload_thread.append(threading.get_ident())
            assert returned.wait(LIMIT_S), "report() waits for the upload"
            return into_the_run(checkpoint, name)

        saved = save("0")
        report({}, saved, checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload)
        returned.set()
        (found,) = get_all_reported_checkpoints()
        assert (Path(found.checkpoint.path) / "weights").read_text() == "0"
        assert not Path(saved.path).exists(), "it is removed after the upload, as in Ray Train"
        return upload_thread != [threading.get_ident()]

    assert fit(function, tmp_path, workers).return_value is True


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("place", ["another way there", "below", "above"])
def test_what_a_function_returns_is_not_removed_with_the_folder_that_it_was_given(
    tmp_path: Path, place: str, mode: CheckpointUploadMode
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    given = {"another way there": "link/mine/part", "below": "mine", "above": "mine/part"}[place]
    kept = {"another way there": "mine/part", "below": "mine/part", "above": "mine"}[place]

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        return Checkpoint(tmp_path / kept)

    def function() -> None:
        (tmp_path / "mine" / "part").mkdir(parents=True)
        (tmp_path / "mine" / "part" / "weights").write_text("0")
        report(
            {},
            Checkpoint(tmp_path / given),
            checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=True,
            checkpoint_upload_fn=upload,
        )

    checkpoint = fit(function, tmp_path / "runs", workers=0).checkpoint
    assert checkpoint == Checkpoint(tmp_path / kept)
    assert (tmp_path / "mine" / "part" / "weights").read_text() == "0"


@pytest.mark.parametrize("returns", [True, False])
def test_an_asynchronous_upload_function_that_raises_ends_training_with_its_error(
    tmp_path: Path, returns: bool
) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise RuntimeError("my store is away")

    def function() -> None:
        report({}, save("0"), checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload)
        get_all_reported_checkpoints()
        if not returns:
            report({})
            raise AssertionError("the error comes before this")

    with pytest.raises(TrainingFailedError, match="my store is away"):
        fit(function, tmp_path, workers=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_asynchronous_upload_function_that_exits_is_not_waited_for(tmp_path: Path, workers: int) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        sys.exit("my store is away")

    def function() -> None:
        report({}, save("0"), checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload)
        get_all_reported_checkpoints()
        raise RuntimeError("the list is there")

    with pytest.raises(TrainingFailedError, match="the list is there"):
        fit(function, tmp_path, workers)


def test_an_upload_that_ends_with_its_process_is_not_waited_for(tmp_path: Path) -> None:
    def function() -> int:
        def never(checkpoint: Checkpoint, name: str) -> Checkpoint:
            threading.Event().wait()
            return checkpoint

        if get_context().get_attempt() == 2:
            return 2
        report({}, save("0"), checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=never)
        raise RuntimeError("as asked")

    deadlines = everstep.Deadlines(upload_wait_s=3600.0)
    failures = FailureConfig(max_failures=1)
    assert fit(function, tmp_path, 1, deadlines=deadlines, failure_config=failures).return_value == 2


def test_an_upload_of_everstep_that_fails_in_the_background_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(job: Path, run: Any) -> None:
        raise OSError("a bad sector")

    def function() -> str:
        report({}, save("0"), checkpoint_upload_mode=ASYNC)
        get_all_reported_checkpoints()
        report({})
        return "trained on"

    monkeypatch.setattr("everstep.storage.pending_uploads.finish", fails)
    result = fit(function, tmp_path, workers=0)
    assert (result.return_value, result.checkpoint) == ("trained on", None)
