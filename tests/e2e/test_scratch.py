"""Temporary files of a worker go with it, however it ends, and with whatever else."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import FailureConfig, RunConfig, ScalingConfig, Trainer
from everstep.testing import LocalCluster
from processes import wait_for

from .test_process_trees import agent_of
from .test_worker_deaths import Fit


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory, as a user has set it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saves(config: dict[str, Any]) -> str:
    """Break off in the middle of saving a checkpoint, the first time."""
    place = Path(tempfile.mkdtemp())
    (place / "half").write_bytes(b"x" * 1000)
    if everstep.get_context().get_attempt() == 1:
        (Path(config["here"]) / "saving.tmp").write_text(f"{os.getpid()} {os.getppid()} {place}")
        (Path(config["here"]) / "saving.tmp").rename(Path(config["here"]) / "saving")
        threading.Event().wait()
    return str(place)


def trainer(tmp_path: Path, **kwargs: Any) -> Trainer:
    return Trainer(
        saves,
        train_loop_config={"here": str(tmp_path)},
        run_config=RunConfig(
            storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)
        ),
        **kwargs,
    )


@pytest.mark.parametrize("who", ["the worker", "the template", "the agent", "the guardian"])
def test_a_worker_that_is_killed_while_it_saves_leaves_no_temporary_folder(
    tmp_path: Path, temporary: Path, who: str
) -> None:
    fit = Fit(lambda: trainer(tmp_path))
    wait_for(lambda: (tmp_path / "saving").exists(), "a worker that saves")
    worker, template, place = (tmp_path / "saving").read_text().split()
    assert Path(place).parent.parent == temporary, "in a folder of its own, where the user wants it"
    victims = {
        "the worker": lambda: int(worker),
        "the template": lambda: int(template),
        "the agent": lambda: agent_of(int(template)),
        "the guardian": lambda: agent_of(agent_of(int(template))),
    }
    os.kill(victims[who](), signal.SIGKILL)
    assert fit.done().return_value != place
    wait_for(lambda: not left_in(temporary), f"an empty {temporary}")


def test_a_host_killed_with_all_that_is_on_it_leaves_nothing_once_its_cluster_is_gone(
    tmp_path: Path, temporary: Path
) -> None:
    with LocalCluster(slices=2) as cluster:
        fit = Fit(lambda: trainer(tmp_path, engine=cluster))
        wait_for(lambda: (tmp_path / "saving").exists(), "a worker that saves")
        template = int((tmp_path / "saving").read_text().split()[1])
        agent = agent_of(template)
        for pid in (agent_of(agent), agent, template):
            os.kill(pid, signal.SIGSTOP)
        for pid in (agent_of(agent), agent, template):
            os.kill(pid, signal.SIGKILL)
        fit.done()
    assert left_in(temporary) == []


def test_every_rank_and_attempt_has_its_own_and_what_is_imported_before_does_not_matter(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks_early.py").write_text("import tempfile\nWHERE = tempfile.gettempdir()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def where() -> None:
        import asks_early

        mine = tempfile.gettempdir()
        assert mine != asks_early.WHERE
        assert mine == os.environ["TMPDIR"]
        all_of_them = everstep.collective.broadcast_from_rank_zero(mine)
        assert everstep.get_context().get_world_rank() == 0 or all_of_them != mine

    Trainer(
        where,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
    ).fit()
    assert left_in(temporary) == []


def test_what_was_reported_is_uploaded_before_the_folder_goes(tmp_path: Path, temporary: Path) -> None:
    """The snapshot of an asynchronous report may lie in there."""

    def reports_and_dies(config: dict[str, Any]) -> None:
        if everstep.get_context().get_attempt() > 1:
            return
        place = Path(tempfile.mkdtemp())
        (place / "model").write_bytes(os.urandom(1 << 20) * 32)
        everstep.report(
            {}, everstep.Checkpoint(str(place)), checkpoint_upload_mode=everstep.CheckpointUploadMode.ASYNC
        )
        os.kill(os.getpid(), signal.SIGKILL)

    result = Trainer(
        reports_and_dies,
        train_loop_config={},
        run_config=RunConfig(
            storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "model").stat().st_size == 32 << 20
    wait_for(lambda: not left_in(temporary), f"an empty {temporary}")
