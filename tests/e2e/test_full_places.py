"""Folders that Everstep itself needs: gone, or full. The error says which one it is, and what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import ControllerError, FailureConfig, RunConfig, Trainer
from everstep.engine.local import cluster as local_cluster
from processes import LIMIT_S

from .scripts import start


def test_a_working_folder_that_was_removed_is_named_before_anything_starts(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        import tempfile

        folder = tempfile.mkdtemp()
        os.chdir(folder)
        os.rmdir(folder)
        Trainer(lambda: None, run_config=RunConfig(storage_path=str(HERE / "runs"))).fit()
        """,
    )
    _, errors = process.communicate(timeout=LIMIT_S)
    assert "ConfigError: the working folder of this process was removed" in errors.splitlines()[-1]


def test_a_working_dir_that_was_removed_since_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    run_config = RunConfig(
        storage_path=str(tmp_path / "runs"), worker_runtime_env={"working_dir": str(tmp_path / "work")}
    )
    (tmp_path / "work").rmdir()
    with pytest.raises(ValueError, match="working_dir.*was removed"):
        Trainer(lambda: None, run_config=run_config).fit()


def test_a_working_folder_that_is_removed_while_the_run_lasts_is_named(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()

    def removes_it() -> None:
        os.rmdir(os.getcwd())
        os.kill(os.getppid(), 9)  # its template, so that another is needed
        threading.Event().wait()

    with pytest.raises(ControllerError, match=f"working folder {tmp_path / 'work'} isn't there"):
        Trainer(
            removes_it,
            run_config=RunConfig(
                storage_path=str(tmp_path / "runs"),
                worker_runtime_env={"working_dir": str(tmp_path / "work")},
                failure_config=FailureConfig(max_failures=1, controller_failure_limit=0),
            ),
        ).fit()


@pytest.fixture
def full_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small file system without a free byte; where none may be mounted, a write that says so."""
    place = Path(f"/tmp/full-{os.getpid()}")
    place.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode == 0:
        (place / "filler").write_bytes(b"x" * (64 << 10))
    else:

        def refuse(path: Path, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr(local_cluster.Path, "write_bytes", refuse)
    yield
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", str(place)], check=True)
    subprocess.run(["rm", "-rf", str(place)], check=True)


@pytest.mark.usefixtures("full_runtime_folder")
def test_a_runtime_folder_that_is_full_is_named(tmp_path: Path) -> None:
    with pytest.raises(ControllerError, match="No space left on device.*set XDG_RUNTIME_DIR"):
        Trainer(
            lambda: None,
            run_config=RunConfig(
                storage_path=str(tmp_path), failure_config=FailureConfig(controller_failure_limit=0)
            ),
        ).fit()


def test_a_log_that_can_not_be_made_is_a_start_that_failed_and_not_a_dead_agent(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "attempt-0001").write_text("in the way")
    with pytest.raises(ControllerError, match="a worker could not be started: .*attempt-0001"):
        Trainer(
            lambda: None,
            run_config=RunConfig(
                name="run",
                storage_path=str(tmp_path),
                failure_config=FailureConfig(controller_failure_limit=0),
            ),
        ).fit()
