"""Ledgers of real runs against a stopwatch in the training function."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import everstep as train
from everstep import CheckpointUploadMode, FailureConfig, Result, RunConfig, ScalingConfig, Trainer
from everstep.control.commands import PhaseChanged
from everstep.journal import journal, records
from noted import notes
from processes import LIMIT_S, wait_for

from .scripts import start
from .training import note, save_step

UPLOAD_S = 0.8
LOST_S = 2.0
RESTORE_S = 1.5


def slow_upload(shared: Path, checkpoint: train.Checkpoint, name: str) -> train.Checkpoint:
    """To one folder, for all ranks."""
    time.sleep(UPLOAD_S)
    (shared / name).mkdir(parents=True, exist_ok=True)
    return train.Checkpoint(str(shared / name))


def saves(config: dict[str, Any]) -> None:
    """Two reports with a checkpoint of the ranks that save, each in step with the others."""
    rank = train.get_context().get_world_rank()
    upload = partial(slow_upload, Path(config["notes"]) / "uploaded")
    for step in (1, 2):
        train.collective.barrier()
        saved = save_step(step) if rank in config["ranks"] else None
        began = time.monotonic()
        train.report(
            {"step": step},
            checkpoint=saved,
            checkpoint_upload_fn=upload if saved is not None else None,
            checkpoint_upload_mode=config["mode"],
        )
        note(config, step=step, took=time.monotonic() - began)
    train.collective.barrier()
    note(config, step=3, left=True)


def fit(tmp_path: Path, workers: int, mode: CheckpointUploadMode, ranks: list[int]) -> Result:
    (tmp_path / "notes").mkdir()
    return Trainer(
        saves,
        train_loop_config={"notes": str(tmp_path / "notes"), "mode": mode, "ranks": ranks},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit()


def lines_of(tmp_path: Path) -> list[dict[str, Any]]:
    """What all ranks noted."""
    return [line for lines in notes(tmp_path / "notes").values() for line in lines]


def longest(tmp_path: Path) -> float:
    """Seconds that the reports or restores took, by the training functions' own clocks: of each, those of the
    rank that took longest.
    """
    by_step: dict[int, float] = {}
    for line in lines_of(tmp_path):
        by_step[line["step"]] = max(by_step.get(line["step"], 0.0), line.get("took", 0.0))
    return sum(by_step.values())


def records_of(tmp_path: Path) -> list[Any]:
    """Those that have a time."""
    return [r for r in journal.read(tmp_path / "run") if hasattr(r, "at")]


def span(tmp_path: Path) -> tuple[list[Any], float]:
    read = records_of(tmp_path)
    return read, read[-1].at - read[0].at


@pytest.mark.parametrize(("workers", "ranks"), [(2, [0]), (2, [0, 1]), (0, [0])])
def test_time_in_which_training_waits_for_uploads_is_a_stall_by_the_stopwatch(
    tmp_path: Path, workers: int, ranks: list[int]
) -> None:
    result = fit(tmp_path, workers, CheckpointUploadMode.SYNC, ranks)
    wanted = max(1, workers)
    _, whole = span(tmp_path)
    assert longest(tmp_path) >= 2 * UPLOAD_S
    assert result.ledger["checkpoint stall"] == pytest.approx(wanted * longest(tmp_path), rel=0.1)
    assert sum(result.ledger.values()) == pytest.approx(wanted * whole, rel=1e-3)


def test_uploads_behind_trainings_back_are_a_stall_only_where_the_end_waits_for_them(tmp_path: Path) -> None:
    result = fit(tmp_path, 2, CheckpointUploadMode.ASYNC, [0])
    read, whole = span(tmp_path)
    left = max(line["at"] for line in lines_of(tmp_path))
    ending = next(r.at for r in read if isinstance(r, PhaseChanged) and r.phase == "ending")
    stall = result.ledger["checkpoint stall"]
    # One clock: all of it is on this machine. From the function's last line to the end of the uploads.
    assert stall == pytest.approx(2 * (ending - left), rel=0.2)
    assert sum(result.ledger.values()) == pytest.approx(2 * whole, rel=1e-3)


TAKEN_OVER = """
    from e2e.training import save_step

    def saves(config):
        rank = everstep.get_context().get_world_rank()
        step = 0
        while not everstep.collective.broadcast_from_rank_zero((HERE / "until").exists()):
            step += 1
            everstep.report({"step": step}, checkpoint=save_step(step) if rank == 0 else None)

    Trainer(
        saves,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(HERE)),
    ).fit()
    """


def test_the_seconds_of_a_run_that_was_taken_over_add_up(tmp_path: Path) -> None:
    first = start(tmp_path, TAKEN_OVER)
    wait_for(lambda: any(isinstance(r, records.Stalled) for r in records_of(tmp_path)), "a stall")
    first.kill()
    first.communicate()
    second = start(tmp_path, TAKEN_OVER)
    wait_for(lambda: any(isinstance(r, records.TakenOver) for r in records_of(tmp_path)), "a take-over")
    (tmp_path / "until").touch()
    _, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, errors
    read = records_of(tmp_path)
    opened = [r for r in read if isinstance(r, records.Opened)]
    began, last = opened[0].wall, read[-1]
    assert isinstance(last, records.Closed)
    ended = last.at + opened[-1].wall - opened[-1].at
    found = Result.from_path(str(tmp_path / "run")).ledger
    assert sum(found.values()) == pytest.approx(2 * (ended - began), rel=1e-3)
    assert found["driver away"] == 0.0
    assert found["checkpoint stall"] > 0.0


def restores(config: dict[str, Any]) -> None:
    """The first attempt dies a while after its checkpoint; those after it take their time to read that, and
    some of them die then.
    """
    began = time.monotonic()
    context = train.get_context()
    rank, checkpoint = context.get_world_rank(), train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory():
            time.sleep(RESTORE_S / (1 + rank))  # of the ranks, the slowest counts
        if context.get_attempt() <= 1 + config["failed"]:
            train.collective.barrier()
            os._exit(3)
        note(config, step=0, took=time.monotonic() - began)
    train.report({"step": 1}, checkpoint=save_step(1) if rank == 0 else None)
    if rank == 0:
        train.get_all_reported_checkpoints()  # once it is committed
    train.collective.barrier()
    note(config, step=1)
    if context.get_attempt() == 1:
        time.sleep(LOST_S)
        train.report({"step": 2})
        train.collective.barrier()
        note(config, step=2)
        os._exit(3)


@pytest.mark.parametrize("failed", [0, 1])
def test_lost_steps_and_a_slow_restore_take_what_the_stopwatch_says(tmp_path: Path, failed: int) -> None:
    """Also if an attempt before has failed in its restore: that is no training either."""
    (tmp_path / "notes").mkdir()
    result = Trainer(
        restores,
        train_loop_config={"notes": str(tmp_path / "notes"), "failed": failed},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1 + failed)
        ),
    ).fit()
    _, whole = span(tmp_path)
    saved, died = (
        max(line["at"] for line in lines_of(tmp_path) if (line["epoch"], line["step"]) == (1, step))
        for step in (1, 2)
    )
    assert result.ledger["restore"] == pytest.approx(2 * longest(tmp_path), rel=0.1)
    assert result.ledger["redo"] == pytest.approx(2 * (died - saved), rel=0.2)
    assert result.ledger["step"] < 2 * RESTORE_S
    assert sum(result.ledger.values()) == pytest.approx(2 * whole, rel=1e-3)


def validated_at_the_end(shared: Path, checkpoint: train.Checkpoint) -> dict[str, Any]:
    """Not before the workers have exited."""

    def phases() -> list[str]:
        return [r.phase for r in journal.read(shared / "run") if isinstance(r, PhaseChanged)]

    wait_for(lambda: "ended" in phases(), "the end of training")
    return {"loss": 0.5}


def test_validations_after_the_workers_have_exited_are_a_category_of_their_own(tmp_path: Path) -> None:
    def saves_last() -> None:
        saved = save_step(1) if train.get_context().get_world_rank() == 0 else None
        train.report({"step": 1}, checkpoint=saved, validation=saved is not None)

    result = Trainer(
        saves_last,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        validation_config=train.ValidationConfig(partial(validated_at_the_end, tmp_path)),
    ).fit()
    assert result.metrics == {"step": 1, "loss": 0.5}
    read, whole = span(tmp_path)
    ended = next(r.at for r in read if isinstance(r, PhaseChanged) and r.phase == "ended")
    validated = next(r.at for r in read if isinstance(r, records.Validated))
    assert result.ledger["validation"] == pytest.approx(2 * (validated - ended), rel=1e-3)
    assert sum(result.ledger.values()) == pytest.approx(2 * whole, rel=1e-3)


def test_a_run_that_only_reports_never_stalls(tmp_path: Path) -> None:
    result = fit(tmp_path, 2, CheckpointUploadMode.SYNC, [])
    assert result.ledger["checkpoint stall"] == 0.0
