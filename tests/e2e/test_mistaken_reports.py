"""Reports that can't come to a checkpoint: what is wrong is said soon, and by name."""

from __future__ import annotations

import tempfile
from enum import Enum
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
    get_context,
    report,
)
from processes import LIMIT_S

from .scripts import start


def fit(function: Any, tmp_path: Path, workers: int = 3, **run: Any) -> Result:
    scaling = ScalingConfig(num_workers=workers)
    return Trainer(
        function, scaling_config=scaling, run_config=RunConfig(storage_path=str(tmp_path), **run)
    ).fit()


def save(files: dict[str, str]) -> Checkpoint:
    folder = tempfile.mkdtemp()
    for name, text in files.items():
        (Path(folder) / name).parent.mkdir(exist_ok=True)
        (Path(folder) / name).write_text(text)
    return Checkpoint.from_directory(folder)


def until_told(folder: Path, body: str) -> tuple[str, str]:
    """The warning about a checkpoint; and, once the workers know that it was seen, the rest of a good end."""
    process = start(folder, body)
    assert process.stderr is not None
    try:
        told = next(line for line in process.stderr if "can't be committed yet" in line)
        (folder / "seen").touch()
        _, rest = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, rest
    return told, rest


def test_ranks_that_never_report_are_named_while_training_goes_on(tmp_path: Path) -> None:
    body = """
    from e2e.training import save_step

    def only_rank_0_reports():
        if everstep.get_context().get_world_rank() == 0:
            for step in range(3):
                everstep.report({"step": step}, checkpoint=save_step(step))
        while not (HERE / "seen").exists():
            time.sleep(0.01)

    Trainer(
        only_rank_0_reports,
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(storage_path=str(HERE / "runs"), deadlines=Deadlines(commit_warn_s=3600)),
    ).fit()
    """
    told, rest = until_told(tmp_path, body)
    assert "checkpoint_0001_000001 can't be committed yet: ranks 1, 2 have not finished report 1" in told
    assert "Every rank must call report() equally often, with checkpoint=None" in told
    assert "can't be committed yet" not in rest, "once is enough"


@pytest.mark.parametrize("mode", ["SYNC", "ASYNC"])
def test_an_upload_function_that_hangs_is_named_with_its_rank_and_what_to_do(
    tmp_path: Path, mode: str
) -> None:
    body = f"""
    from e2e.training import save_step

    def hangs(checkpoint, name):
        while not (HERE / "seen").exists():
            time.sleep(0.01)
        return checkpoint

    def uploads():
        rank = everstep.get_context().get_world_rank()
        everstep.report(
            {{"step": 1}},
            checkpoint=save_step(1) if rank == 1 else None,
            checkpoint_upload_fn=hangs,
            checkpoint_upload_mode=everstep.CheckpointUploadMode.{mode},
        )

    Trainer(
        uploads,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(HERE / "runs"), deadlines=Deadlines(commit_warn_s=0.2)),
    ).fit()
    """
    told, _ = until_told(tmp_path, body)
    assert "report 1 can't be committed yet: rank 1 still uploads to it" in told
    assert "a checkpoint_upload_fn needs one of yours" in told


@pytest.mark.parametrize("function", ["get_checkpoint", "get_all_reported_checkpoints"])
def test_ranks_that_a_question_about_checkpoints_waits_for_are_named(tmp_path: Path, function: str) -> None:
    body = f"""
    def asks():
        if everstep.get_context().get_world_rank() == 0:
            everstep.report({{"step": 1}})
            everstep.{function}()
        else:
            while not (HERE / "seen").exists():
                time.sleep(0.01)
            everstep.report({{"step": 1}})

    Trainer(
        asks,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(HERE / "runs")),
    ).fit()
    """
    process = start(tmp_path, body)
    assert process.stderr is not None
    try:
        told = next(line for line in process.stderr if "waits for" in line)
        (tmp_path / "seen").touch()
        _, rest = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert f"{function}() at rank 0 waits for rank 1 to make report 1. Every rank must call report()" in told
    assert process.returncode == 0, rest


@pytest.mark.parametrize("upload", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
@pytest.mark.parametrize("returns", [False, True])
def test_one_file_name_with_different_content_is_an_error_that_names_ranks_and_file(
    tmp_path: Path, upload: CheckpointUploadMode, returns: bool
) -> None:
    def function() -> None:
        rank = get_context().get_world_rank()
        files = {f"shard-{rank}": str(rank), "sub/weights": "same" if rank == 0 else f"from {rank}"}
        report({}, save(files if rank < 2 else {"own": "x"}), checkpoint_upload_mode=upload)
        if not returns:
            everstep.collective.barrier()
            report({})
            everstep.get_all_reported_checkpoints()

    with pytest.raises(TrainingFailedError) as raised:
        fit(function, tmp_path, name="clash", failure_config=FailureConfig(max_failures=-1))
    assert "ranks 0 and 1 saved 'sub/weights' in the same checkpoint" in str(raised.value).splitlines()[0]
    assert "f'shard-{rank}'" in str(raised.value)
    assert Result.from_path(tmp_path / "clash").checkpoint is None


def test_a_run_that_ended_for_conflicting_files_can_be_resumed(tmp_path: Path) -> None:
    def function() -> None:
        context = get_context()
        content = str(context.get_world_rank() if context.get_attempt() == 1 else "same")
        report({"epoch": context.get_attempt()}, save({"weights": content}))

    with pytest.raises(TrainingFailedError, match="with different content"):
        fit(function, tmp_path, name="clash")
    result = fit(function, tmp_path, name="clash")
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [2]


def test_the_same_file_from_every_rank_is_one_file(tmp_path: Path) -> None:
    def function() -> None:
        report({}, save({"config.json": "{}"}))

    checkpoint = fit(function, tmp_path).checkpoint
    assert checkpoint is not None
    assert (Path(checkpoint.path) / "config.json").read_text() == "{}"


def test_ranks_that_report_different_places_end_the_run_and_are_named(tmp_path: Path) -> None:
    def function() -> None:
        rank = get_context().get_world_rank()
        mine = tmp_path / f"mine-{rank}"
        mine.mkdir()
        (mine / f"shard-{rank}").write_text("weights")
        report({}, Checkpoint(mine), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    failures = FailureConfig(max_failures=-1)
    with pytest.raises(
        TrainingFailedError, match="rank 0 saved in .*mine-0, and rank 1 in .*mine-1"
    ) as caught:
        fit(function, tmp_path / "runs", workers=2, failure_config=failures)
    assert "into one folder" in str(caught.value)


class Mode(Enum):
    """Another library's, as a script has it that was moved over in part."""

    NO_UPLOAD = "NO_UPLOAD"

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"checkpoint": "/a/folder"}, "report(checkpoint=…) is a str, expected an everstep.Checkpoint"),
        ({"checkpoint_upload_mode": "ASYNC"}, "(checkpoint_upload_mode=…) is a str, expected an everstep.C"),
        ({"checkpoint_upload_mode": Mode.NO_UPLOAD}, "is a e2e.test_mistaken_reports.Mode, expected an ever"),
        ({"checkpoint_upload_fn": "upload"}, "(checkpoint_upload_fn=…) is a str, expected a function"),
    ],
)
def test_an_argument_of_another_kind_is_named_before_anything_is_reported(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    def function() -> str:
        try:
            report({}, **{"checkpoint": save({"weights": "0"}), **given})
        except ValueError as error:
            return str(error)
        return ""

    result = fit(function, tmp_path, workers=0)
    assert told in result.return_value
    assert result.metrics is None
