"""``num_workers=0``: what is stored is stored as with workers."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import Checkpoint, CheckpointConfig, Result, RunConfig, ScalingConfig, Trainer
from everstep.journal import journal
from everstep.journal.history import read_history
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.store import open_store


def train(config: dict[str, list[int]]) -> None:
    step = 0
    checkpoint = everstep.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            step = int((Path(folder) / "step").read_text())
    config["began_at"].append(step)
    folder = tempfile.mkdtemp()
    (Path(folder) / "step").write_text(str(step + 1))
    everstep.report({"step": step + 1}, checkpoint=Checkpoint(folder))


def test_a_run_whose_journal_has_lost_an_archive_goes_on(tmp_path: Path) -> None:
    began_at: list[int] = []

    def fit() -> int:
        Trainer(
            train,
            train_loop_config={"began_at": began_at},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=str(tmp_path), if_finished="continue"),
        ).fit()
        return began_at[-1]

    assert fit() == 0
    store = ImmediateStore(open_store(tmp_path / "run")).child(journal.FOLDER)
    scan = complete(journal.scan_journal(store))
    log = journal.Journal(store, scan.next, scan.first, scan.archives)
    complete(log.compact())
    assert fit() == 1
    for archive in (tmp_path / "run" / journal.FOLDER).glob("archive-*"):
        archive.unlink()
    assert fit() == 2
    assert complete(journal.scan_journal(store)).is_whole, "it has a new beginning"


def fit_here(function: Any, tmp_path: Path, **run: Any) -> Result:
    return Trainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), if_finished="continue", **run),
    ).fit()


def save(text: str) -> Checkpoint:
    folder = tempfile.mkdtemp()
    (Path(folder) / "weights").write_text(text)
    return Checkpoint(folder)


def test_a_function_may_end_with_an_exit_as_in_a_worker(tmp_path: Path) -> None:
    def function() -> None:
        everstep.report({}, checkpoint=save("0"))
        sys.exit()

    result = fit_here(function, tmp_path)
    assert (result.error, len(result.best_checkpoints)) == (None, 1)
    with pytest.raises(SystemExit, match="3"):
        fit_here(lambda: sys.exit(3), tmp_path)


@pytest.mark.parametrize("mode", [everstep.CheckpointUploadMode.SYNC, everstep.CheckpointUploadMode.ASYNC])
def test_a_commit_or_a_removal_that_storage_refuses_does_not_end_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    mode: everstep.CheckpointUploadMode,
) -> None:
    refused = everstep.StorageError("no space left")

    async def refuse(*_: object) -> None:
        raise refused

    def function() -> str:
        for step in range(3):
            with monkeypatch.context() as patch:
                if step == 1:
                    patch.setattr("everstep.storage.checkpoints.commit", refuse)
                if step == 2:
                    patch.setattr("everstep.driver.deletions.Deletions.remove", refuse)
                everstep.report({"step": step}, save(str(step)), checkpoint_upload_mode=mode)
                everstep.get_all_reported_checkpoints()
        return "trained on"

    result = fit_here(function, tmp_path, checkpoint_config=CheckpointConfig(num_to_keep=1))
    assert (result.return_value, [metrics["step"] for _, metrics in result.best_checkpoints]) == (
        "trained on",
        [2],
    )
    told = capfd.readouterr().err
    assert "checkpoint_0001_000002 can't be committed: no space left" in told
    assert "checkpoint_0001_000001 is no longer needed, and can't be removed: no space left" in told


def test_a_terminal_is_left_to_the_debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    threads: list[str] = []

    def first() -> None:
        pass

    def changed() -> None:
        threads.extend(thread.name for thread in threading.enumerate())

    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(leader, "rb", buffering=0) as seen, os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        fit_here(first, tmp_path)
        fit_here(changed, tmp_path)
        assert b"changed since this run was last started" in seen.read(4096)
    assert "everstep-display" not in threads


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_has_no_name_that_was_used_before_the_journal_was_lost(tmp_path: Path, workers: int) -> None:
    def fit() -> str:
        result = Trainer(
            lambda: everstep.report({}, checkpoint=save("0")),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(name="run", storage_path=str(tmp_path), if_finished="continue"),
        ).fit()
        assert result.checkpoint is not None
        return result.checkpoint.path

    first = fit()
    for lost in (first, tmp_path / "run" / "journal"):
        shutil.rmtree(lost)
    assert (Path(first).name, Path(fit()).name) == ("checkpoint_0001_000001", "checkpoint_0002_000001")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_reason_of_a_start_is_the_resume_from_the_second_fit_on(tmp_path: Path, workers: int) -> None:
    def fit() -> str:
        result = Trainer(
            lambda: everstep.get_context().get_restart_reason(),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(name="run", storage_path=str(tmp_path), if_finished="continue"),
        ).fit()
        assert isinstance(result.return_value, str)
        return result.return_value

    assert [fit(), fit()] == ["first start", "resumed"]


def test_a_state_is_on_record_as_one(tmp_path: Path) -> None:
    def saves_its_state() -> None:
        import torch

        from everstep.torch import State

        model = torch.nn.Linear(2, 2)
        everstep.report({}, state=State(model=model), step=1)

    fit_here(saves_its_state, tmp_path)
    history = read_history(open_store(tmp_path / "run"))
    assert [kept.ref.state for kept in history.checkpoints.values()] == [True]
