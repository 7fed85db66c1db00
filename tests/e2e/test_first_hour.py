"""What a first hour runs into: each has its cause in one line, and ends by itself."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from everstep import (
    ControllerError,
    Deadlines,
    FailureConfig,
    FunctionLoadError,
    RunConfig,
    ScalingConfig,
    StorageAccessError,
    Trainer,
    WorkerGroupError,
)
from everstep.backend.base import Endpoint, Member, NoBackend
from everstep.torch import TorchTrainer
from processes import LIMIT_S

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


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place where nobody can make a folder")
def test_storage_that_cannot_be_made_is_named_and_its_error_shows_no_code_of_ours(tmp_path: Path) -> None:
    trainer = Trainer(train, run_config=RunConfig(name="x", storage_path="/proc/missing"))
    with pytest.raises(StorageAccessError, match="/proc/missing/x can't be created") as caught:
        trainer.fit()
    assert [entry.name for entry in caught.traceback][1:] == ["fit"]


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


SCRIPT = """
import argparse, logging, sys
import everstep as train

log = logging.getLogger("model")

def train_loop():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    lr = parser.parse_args().lr
    log.debug("learning rate %s", lr)
    logging.getLogger("quiet").info("not worth a line")
    train.report({"lr": lr, "script": sys.argv[0]})

if __name__ == "__main__":
    format = "{levelname}|{name}|{message}"
    logging.basicConfig(level=logging.INFO, format=format, style="{", stream=sys.stdout)
    log.setLevel(logging.DEBUG)
    logging.getLogger("quiet").setLevel(logging.WARNING)
    result = train.Trainer(train_loop, run_config=train.RunConfig(storage_path="runs")).fit()
    assert result.metrics == {"lr": 0.25, "script": sys.argv[0]}, result.metrics
"""


def test_workers_have_the_arguments_and_the_logging_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", "--lr", "0.25"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    logged = [line for text in (done.stdout, done.stderr) for line in text.splitlines() if "|model|" in line]
    assert logged == ["[rank 0] DEBUG|model|learning rate 0.25"], done.stderr
    assert "not worth a line" not in done.stdout + done.stderr
