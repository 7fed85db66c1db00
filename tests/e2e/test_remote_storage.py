"""Runs that live in a bucket: the same as in a folder, through a server that speaks S3."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    StorageAccessError,
    Trainer,
    TrainingFailedError,
    get_context,
    report,
)
from everstep.storage import restore
from everstep.storage.store import open_store
from storage.faults import Fault, FaultyProxy
from storage.server import S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def storage(server: S3Server) -> dict[str, Any]:
    """The arguments of a ``RunConfig``."""
    return {"storage_path": f"s3://{server.bucket()}/runs", "storage_options": server.options()}


def fit(function: Any, workers: int = 2, config: dict[str, Any] | None = None, **run: Any) -> Result:
    return Trainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(**run),
    ).fit()


def save(text: str, name: str = "weights") -> Checkpoint:
    folder = tempfile.mkdtemp()
    (Path(folder) / name).write_text(text)
    return Checkpoint.from_directory(folder)


def restored() -> int:
    checkpoint = everstep.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int((Path(folder) / "shard-0").read_text())


def test_shards_of_all_ranks_form_one_checkpoint_in_the_bucket(storage: dict[str, Any]) -> None:
    def function() -> None:
        rank = get_context().get_world_rank()
        report({"loss": 1.0}, checkpoint=save(f"from {rank}", f"shard-{rank}"))

    result = fit(function, workers=3, **storage)
    assert result.checkpoint is not None
    assert result.path.startswith(storage["storage_path"])
    assert result.checkpoint.path.startswith(result.path)
    with result.checkpoint.as_directory() as folder:
        assert [(Path(folder) / f"shard-{r}").read_text() for r in range(3)] == ["from 0", "from 1", "from 2"]
    store = open_store(result.checkpoint.path, storage["storage_options"])
    assert restore.verify(store).ranks == [0, 1, 2]


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_a_worker_that_dies_goes_on_from_what_is_in_the_bucket(
    storage: dict[str, Any], mode: CheckpointUploadMode
) -> None:
    def function(config: dict[str, Any]) -> int:
        rank = get_context().get_world_rank()
        start = restored()
        for step in range(start + 1, 7):
            report(
                {"step": step},
                checkpoint=save(str(step), f"shard-{rank}"),
                checkpoint_upload_mode=config["mode"],
            )
            everstep.collective.barrier()
            if rank == 1 and step == 3 and get_context().get_attempt() == 1:
                import os
                import signal

                assert len(everstep.get_all_reported_checkpoints()) == step
                os.kill(os.getpid(), signal.SIGKILL)
        return start

    result = fit(function, config={"mode": mode}, failure_config=FailureConfig(max_failures=1), **storage)
    assert result.return_value == 3
    assert [metrics["step"] for _, metrics in result.best_checkpoints][-1] == 6


def test_the_same_name_resumes_and_retention_empties_the_bucket(storage: dict[str, Any]) -> None:
    def function(config: dict[str, Any]) -> int:
        start = restored()
        for step in range(start + 1, config["until"] + 1):
            checkpoint = save(str(step), "shard-0") if get_context().get_world_rank() == 0 else None
            report({"step": step}, checkpoint=checkpoint)
        return start

    storage["checkpoint_config"] = CheckpointConfig(num_to_keep=2)
    first = fit(function, config={"until": 4}, name="r", **storage)
    again = fit(function, config={"until": 6}, name="r", if_finished="continue", **storage)
    assert (first.return_value, again.return_value) == (0, 4)
    assert [row["step"] for row in again.metrics_history] == [1, 2, 3, 4, 5, 6]
    run = open_store(again.path, storage["storage_options"])
    assert len([folder for folder in run.folders() if folder.startswith("checkpoint_")]) == 2


def test_num_workers_zero_and_names_of_the_users_choice(storage: dict[str, Any]) -> None:
    def function() -> None:
        report({"x": 1}, checkpoint=save("here"), checkpoint_dir_name="best")
        (kept,) = everstep.get_all_reported_checkpoints()
        with kept.checkpoint.as_directory() as folder:
            assert (Path(folder) / "weights").read_text() == "here"

    result = fit(function, workers=0, **storage)
    assert result.checkpoint is not None
    assert result.checkpoint.path == f"{result.path}/best"


def test_storage_that_fails_for_a_while_is_told_and_training_goes_on(
    server: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function(config: dict[str, Any]) -> None:
        flag = Path(config["flag"])
        report({"step": 1}, checkpoint=save("1"))
        everstep.get_all_reported_checkpoints()  # waits until it is committed
        flag.touch()
        report({"step": 2}, checkpoint=save("2"))
        flag.unlink()
        report({"step": 3}, checkpoint=save("3"))

    flag = tmp_path / "broken"
    with FaultyProxy(server.port) as proxy:

        def judge(request: Any) -> Fault | None:
            # An error that isn't tried again: the test needn't wait for the deadline of those that are.
            return Fault.FORBIDDEN if flag.exists() and request.method == "PUT" else None

        proxy.judge = judge
        result = fit(
            function,
            workers=1,
            config={"flag": str(flag)},
            storage_path=f"s3://{server.bucket()}/runs",
            storage_options=server.options(proxy.port),
        )
        assert [metrics["step"] for _, metrics in result.best_checkpoints] == [1, 3]
        assert [row["step"] for row in result.metrics_history] == [1, 2, 3]
        assert proxy.done
    assert "could not save its part of checkpoint 2" in capfd.readouterr().err


def test_storage_that_is_away_at_the_moment_of_a_restart_is_waited_for(
    server: S3Server, tmp_path: Path
) -> None:
    def function(config: dict[str, Any]) -> int:
        if get_context().get_attempt() == 1:
            Path(config["flag"]).touch()
            raise RuntimeError("as asked")
        return get_context().get_attempt()

    flag = tmp_path / "away"
    refused = 0
    with FaultyProxy(server.port) as proxy:

        def judge(request: Any) -> Fault | None:
            nonlocal refused
            if not flag.exists() or request.method != "PUT" or "/journal/" not in request.path:
                return None
            refused += 1
            if refused == 5:
                flag.unlink()
            return Fault.FORBIDDEN

        proxy.judge = judge
        result = fit(
            function,
            config={"flag": str(flag)},
            name="away",
            failure_config=FailureConfig(max_failures=1),
            storage_path=f"s3://{server.bucket()}/runs",
            storage_options=server.options(proxy.port),
        )
    assert refused == 5
    assert result.return_value == 2


def test_the_end_of_what_a_failed_rank_printed_is_kept_in_the_bucket(storage: dict[str, Any]) -> None:
    def function() -> None:
        if get_context().get_world_rank() == 1:
            print("the last words of rank 1")
            raise RuntimeError("as asked")
        everstep.collective.barrier()

    with pytest.raises(TrainingFailedError):
        fit(function, name="tails", **storage)
    run = open_store(f"{storage['storage_path']}/tails", storage["storage_options"])
    kept = run.read("logs/attempt-0001/rank-00001.log")
    assert kept is not None
    assert b"the last words of rank 1" in kept
    assert [file.path for file in run.list("logs")] == ["logs/attempt-0001/rank-00001.log"]


def test_a_bucket_that_is_not_there_is_refused_before_any_worker_starts(server: S3Server) -> None:
    with pytest.raises(StorageAccessError, match="Make the bucket nowhere first"):
        fit(lambda: None, storage_path="s3://nowhere/runs", storage_options=server.options())


def test_a_run_is_kept_where_ray_trains_arguments_in_the_address_say(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> None:
        report({"x": 1}, checkpoint=save("here"))

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    bucket = server.bucket()
    address = f"s3://{bucket}/runs?endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-1"
    result = fit(function, workers=1, storage_path=address, name="r")
    assert result.path == f"s3://{bucket}/runs/r"
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert (Path(folder) / "weights").read_text() == "here"
