"""Reports and checkpoints, as a training function makes them."""

from __future__ import annotations

import math
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

import everstep
from everstep import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    UserCallback,
    WorkerGroupError,
    get_context,
    report,
)
from everstep.driver.commits import Commits
from processes import ours, wait_for


def fit(
    function: Any, tmp_path: Path, workers: int = 2, config: dict[str, Any] | None = None, **run: Any
) -> Result:
    return Trainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(tmp_path), **run),
    ).fit()


def test_rank_zeros_whole_history_is_kept_in_order(tmp_path: Path) -> None:
    def function() -> None:
        for step in range(20_000):
            report({"step": step, "rank": get_context().get_world_rank()})

    result = fit(function, tmp_path, workers=4)
    assert [row["step"] for row in result.metrics_history] == list(range(20_000))
    assert {row["rank"] for row in result.metrics_history} == {0}
    assert result.metrics_dataframe is not None
    assert len(result.metrics_dataframe) == 20_000


def test_nan_inf_numpy_and_torch_scalars_are_metrics(tmp_path: Path) -> None:
    def function() -> None:
        import torch

        report(
            {
                "nan": math.nan,
                "inf": -math.inf,
                "f32": numpy.float32(1.5),
                "i": numpy.int64(3),
                "t": torch.tensor(2.5),
            }
        )

    (row,) = fit(function, tmp_path, workers=1).metrics_history
    assert math.isnan(row.pop("nan"))
    assert row == {"inf": -math.inf, "f32": 1.5, "i": 3, "t": 2.5}


def test_a_metric_that_can_not_be_kept_is_named(tmp_path: Path) -> None:
    def function() -> None:
        report({"good": 1, "bad": object()})

    with pytest.raises(TrainingFailedError, match="'bad' can't be reported"):
        fit(function, tmp_path, workers=1)


def save(text: str, name: str = "weights") -> Checkpoint:
    folder = tempfile.mkdtemp()
    (Path(folder) / name).write_text(text)
    return Checkpoint.from_directory(folder)


def test_shards_of_all_ranks_form_one_checkpoint_of_plain_files(tmp_path: Path) -> None:
    def function() -> None:
        rank = get_context().get_world_rank()
        report({"loss": 1.0}, checkpoint=save(f"from {rank}", f"shard-{rank}"))

    result = fit(function, tmp_path, workers=3)
    assert result.checkpoint is not None
    files = {
        p.name: p.read_text() for p in Path(result.checkpoint.path).iterdir() if not p.name.startswith(".")
    }
    assert files == {f"shard-{r}": f"from {r}" for r in range(3)}
    assert result.best_checkpoints == [(result.checkpoint, {"loss": 1.0})]


def test_a_checkpoint_is_not_there_until_every_rank_has_reported_it(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> list[int]:
        rank = get_context().get_world_rank()
        counts = []
        if rank == 0:
            report({"k": 1}, checkpoint=save("one"))
            counts.append(len(everstep.get_all_reported_checkpoints(timeout_s=0.0)))
            everstep.collective.barrier()
        else:
            everstep.collective.barrier()
            report({"k": 1})
        everstep.collective.barrier()
        report({"k": 2}, checkpoint=save("two") if rank == 0 else None)
        counts.append(len(everstep.get_all_reported_checkpoints()))
        return counts

    assert fit(function, tmp_path, config={}).return_value == [0, 2]


def test_a_rank_that_returned_has_nothing_to_add(tmp_path: Path) -> None:
    def function() -> None:
        if get_context().get_world_rank() == 0:
            report({"k": 1}, checkpoint=save("alone"))

    result = fit(function, tmp_path, workers=3)
    assert result.checkpoint is not None


def test_asynchronous_uploads_are_there_when_the_run_ends(tmp_path: Path) -> None:
    def function() -> None:
        rank = get_context().get_world_rank()
        for step in range(5):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / f"shard-{rank}").write_text(str(step))
                report(
                    {"step": step},
                    checkpoint=Checkpoint.from_directory(folder),
                    checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                    delete_local_checkpoint_after_upload=False,
                )

    result = fit(function, tmp_path)
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [0, 1, 2, 3, 4]
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "shard-1").read_text() == "4"


def test_a_report_of_the_folder_of_all_runs_is_refused_and_nothing_is_removed(tmp_path: Path) -> None:
    def function() -> None:
        report({}, checkpoint=Checkpoint(str(tmp_path)), delete_local_checkpoint_after_upload=True)

    with pytest.raises(WorkerGroupError, match="is the folder of a run"):
        fit(function, tmp_path, workers=1, name="all")
    assert (tmp_path / "all" / "journal").is_dir()


def test_a_checkpoint_that_everstep_does_not_upload_keeps_its_address(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "weights").write_text("elsewhere")

    def function(config: dict[str, Any]) -> None:
        report(
            {"x": 1},
            checkpoint=Checkpoint(config["mine"]),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    result = fit(function, tmp_path, config={"mine": str(mine)}, workers=1)
    assert result.checkpoint == Checkpoint(str(mine))
    assert (mine / "weights").exists()


@pytest.mark.parametrize("told_to", [False, True])
def test_retention_deletes_what_everstep_did_not_upload_only_if_told_to(
    tmp_path: Path, told_to: bool
) -> None:
    def function(config: dict[str, Any]) -> None:
        for step in range(3):
            mine = Path(config["mine"]) / str(step)
            mine.mkdir(parents=True)
            (mine / "weights").write_text("elsewhere")
            report(
                {"x": step},
                checkpoint=Checkpoint(str(mine)),
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
            (mine / "later").write_text("not part of what was reported")

    mine = tmp_path / "mine"
    config = CheckpointConfig(num_to_keep=1, delete_external=told_to)
    result = fit(function, tmp_path, config={"mine": str(mine)}, workers=1, checkpoint_config=config)
    assert result.checkpoint == Checkpoint(str(mine / "2"))
    assert [(mine / str(step) / "weights").exists() for step in range(3)] == [not told_to, not told_to, True]
    assert all((mine / str(step) / "later").exists() for step in range(3))


def test_nan_inf_and_numpy_scalars_survive_a_resume(tmp_path: Path) -> None:
    def function() -> None:
        if get_context().get_attempt() == 1:
            odd = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "f32": numpy.float32(0.5)}
            report(odd, checkpoint=save("1"))
            everstep.get_all_reported_checkpoints()  # waits until it is committed
            raise RuntimeError("as asked")
        (kept,) = everstep.get_all_reported_checkpoints()
        assert math.isnan(kept.metrics["nan"])
        report({"second": numpy.int32(2)})

    with pytest.raises(TrainingFailedError):
        fit(function, tmp_path, workers=1, name="odd")
    result = fit(function, tmp_path, workers=1, name="odd")
    first, second = result.metrics_history
    assert math.isnan(first.pop("nan"))
    assert first == {"inf": math.inf, "minus": -math.inf, "f32": 0.5}
    assert second == {"second": 2}
    again = Result.from_path(result.path)
    assert again.metrics_history[0]["minus"] == -math.inf
    assert again.metrics_dataframe is not None
    assert math.isinf(again.metrics_dataframe["inf"][0])


def test_retention_keeps_the_best_and_always_the_newest(tmp_path: Path) -> None:
    def function() -> None:
        for score in (3.0, math.nan, 5.0, 4.0, 1.0):
            report({"score": score}, checkpoint=save(str(score)))

    result = fit(
        function,
        tmp_path,
        workers=1,
        checkpoint_config=CheckpointConfig(num_to_keep=3, checkpoint_score_attribute="score"),
    )
    assert [metrics["score"] for _, metrics in result.best_checkpoints] == [1.0, 3.0, 4.0, 5.0]
    assert [m for _, m in Result.from_path(result.path).best_checkpoints][-1] == {"score": 5.0}
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "weights").read_text() == "1.0"
    assert len([p for p in Path(result.path).iterdir() if p.name.startswith("checkpoint_")]) == 4


def test_a_checkpoint_dir_name_used_again_by_a_rewound_run_gets_a_suffix(tmp_path: Path) -> None:
    def function() -> None:
        report({"x": 1}, checkpoint=save("first"), checkpoint_dir_name="epoch=1")
        everstep.collective.barrier()
        if get_context().get_attempt() == 1:
            raise RuntimeError("once")

    result = fit(function, tmp_path, workers=2, failure_config=everstep.FailureConfig(max_failures=1))
    names = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert names == ["epoch=1", "epoch=1.e2.1"]


def test_a_checkpoint_dir_name_used_twice_in_one_attempt_names_two_checkpoints(tmp_path: Path) -> None:
    def function() -> None:
        for text in ("first", "second"):
            report({"x": text}, checkpoint=save(text), checkpoint_dir_name="best")

    result = fit(function, tmp_path, workers=2)
    found = [(Path(c.path).name, (Path(c.path) / "weights").read_text()) for c, _ in result.best_checkpoints]
    assert found == [("best", "first"), ("best.e1.2", "second")]


def test_storage_that_is_away_when_a_name_is_claimed_costs_that_checkpoint_only(tmp_path: Path) -> None:
    def function() -> None:
        from everstep.errors import StorageError
        from everstep.storage import checkpoints

        claim = checkpoints.claim_name

        def away(*_: object) -> str:
            raise StorageError("storage is away")

        checkpoints.claim_name = away
        report({"x": 1}, checkpoint=save("first"), checkpoint_dir_name="first")
        checkpoints.claim_name = claim
        report({"x": 2}, checkpoint=save("second"), checkpoint_dir_name="second")

    result = fit(function, tmp_path, workers=1)
    assert [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints] == ["second"]
    assert [row["x"] for row in result.metrics_history] == [1, 2]


def test_retention_lets_go_of_what_is_in_a_place_that_only_the_users_code_can_read(tmp_path: Path) -> None:
    def function() -> None:
        for step in range(3):
            there = Checkpoint(f"hdfs://cluster/{step}")
            report({"x": step}, checkpoint=there, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    config = CheckpointConfig(num_to_keep=1, delete_external=True)
    result = fit(function, tmp_path, workers=1, checkpoint_config=config)
    assert result.checkpoint == Checkpoint("hdfs://cluster/2")


def test_a_driver_that_breaks_while_it_ends_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Commits, limit_s: float) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Commits, "finish_deletions", broken)
    with pytest.raises(TrainingFailedError, match="a bug"):
        fit(lambda: report({"x": 1}), tmp_path, workers=1)
    wait_for(lambda: not ours(), "the end of all")


@pytest.mark.parametrize("name", ["journal", "logs", "requests"])
def test_a_checkpoint_dir_name_that_everstep_uses_itself_is_refused(tmp_path: Path, name: str) -> None:
    def function() -> None:
        report({}, checkpoint=save("x"), checkpoint_dir_name=name)

    with pytest.raises(TrainingFailedError, match=f"checkpoint_dir_name='{name}'.*uses itself"):
        fit(function, tmp_path, workers=1)


@pytest.mark.parametrize("upload", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
@pytest.mark.parametrize("name", ["x" * 256, "ä" * 128, "x" * 250])
def test_a_checkpoint_dir_name_that_is_too_long_is_refused_with_its_length(
    tmp_path: Path, name: str, upload: CheckpointUploadMode
) -> None:
    def function() -> None:
        report({}, checkpoint=save("x"), checkpoint_dir_name=name, checkpoint_upload_mode=upload)

    with pytest.raises(TrainingFailedError, match=f"checkpoint_dir_name=.* has {len(name.encode())} bytes"):
        fit(function, tmp_path, workers=1)


def test_a_checkpoint_dir_name_that_is_no_text_is_refused_by_its_kind(tmp_path: Path) -> None:
    def function() -> None:
        report({}, checkpoint=save("x"), checkpoint_dir_name=7)  # type: ignore[arg-type]

    with pytest.raises(TrainingFailedError, match=r"report\(checkpoint_dir_name=…\) is a int"):
        fit(function, tmp_path, workers=1)


def _contains_itself() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = [found, {"again": found}]
    return found


def _deep(levels: int) -> Any:
    found: Any = 1.0
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("levels", [None, 101, 10_000])
def test_metrics_that_contain_themselves_or_are_nested_too_deep_are_named(
    tmp_path: Path, levels: int | None, workers: int
) -> None:
    def function() -> None:
        inner = _contains_itself() if levels is None else _deep(levels - 1)
        report({"fine": {"loss": [1.0]}, "bad": inner})

    says = r"report\(metrics\): 'bad' is nested more than 100 levels deep, or contains itself"
    with pytest.raises((TrainingFailedError, everstep.ConfigError), match=says):
        fit(function, tmp_path, workers=workers)


def test_metrics_as_deep_as_they_may_be_are_kept(tmp_path: Path) -> None:
    result = fit(lambda: report(_deep(100)), tmp_path, workers=1)
    assert result.metrics_history == [_deep(100)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_return_value_that_contains_itself_is_returned_and_the_run_has_finished(
    tmp_path: Path, workers: int
) -> None:
    result = fit(_contains_itself, tmp_path, workers=workers, name="run")
    assert result.return_value["self"][0] is result.return_value
    assert fit(_contains_itself, tmp_path, workers=workers, name="run").return_value is None


def test_ranks_that_name_one_checkpoint_differently_are_told(tmp_path: Path) -> None:
    def function() -> None:
        rank = get_context().get_world_rank()
        report({}, checkpoint=save("x"), checkpoint_dir_name=f"rank-{rank}")
        everstep.collective.barrier()

    with pytest.raises(TrainingFailedError, match="at another rank, in report 1.*same name at all ranks"):
        fit(function, tmp_path, workers=2)


def test_callbacks_see_every_ranks_report_and_one_that_raises_ends_nothing(tmp_path: Path) -> None:
    class Watch(UserCallback):
        def __init__(self) -> None:
            self.rows: list[Any] = []
            self.failures: list[Any] = []

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            self.rows.append([row["rank"] for row in metrics])
            raise RuntimeError("a bug in a callback")

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            self.failures.append(sorted(worker_exceptions))

    def function() -> None:
        for _ in range(3):
            report({"rank": get_context().get_world_rank()})
        if get_context().get_attempt() == 1 and get_context().get_world_rank() == 1:
            raise ValueError("once")

    watch = Watch()
    fit(function, tmp_path, callbacks=[watch], failure_config=everstep.FailureConfig(max_failures=1))
    assert watch.rows[-3:] == [[0, 1]] * 3
    assert watch.failures == [[1]]


def test_num_workers_zero_runs_in_this_process(tmp_path: Path) -> None:
    def function() -> int:
        report({"x": 1}, checkpoint=save("here"))
        return threading.get_ident()

    result = fit(function, tmp_path, workers=0)
    assert result.return_value == threading.get_ident()
    assert result.checkpoint is not None
    assert result.metrics_history == [{"x": 1}]


def test_output_of_log_ranks_reaches_the_terminal_and_all_output_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        print(f"hello from {get_context().get_world_rank()}")

    result = fit(function, tmp_path, workers=3, log_ranks=(1,))
    shown = capfd.readouterr().err
    assert "[rank 1] hello from 1" in shown
    assert "hello from 0" not in shown
    logs = sorted((Path(result.path) / "logs").rglob("rank-*.log"))
    assert [path.read_text() for path in logs] == [f"hello from {r}\n" for r in range(3)]


def test_a_finished_run_gives_its_result_again(tmp_path: Path) -> None:
    def function() -> int:
        report({"x": 1})
        return 3

    first = fit(function, tmp_path, name="once")
    again = fit(function, tmp_path, name="once")
    assert again.return_value == first.return_value == 3
    assert again.metrics_history == [{"x": 1}]
    more = fit(function, tmp_path, name="once", if_finished="continue")
    assert more.metrics_history == [{"x": 1}, {"x": 1}]


def test_an_asynchronous_report_that_returned_survives_its_workers_sigkill(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> int:
        import os
        import signal

        checkpoint = everstep.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                return int((Path(folder) / "size").read_text())
        folder = tempfile.mkdtemp()
        (Path(folder) / f"weights-{get_context().get_world_rank()}").write_bytes(os.urandom(64 << 20))
        (Path(folder) / "size").write_text("7")
        report(
            {"x": 1},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        )
        everstep.collective.barrier()
        if get_context().get_world_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
        return 0

    result = fit(
        function, tmp_path, workers=2, config={}, failure_config=everstep.FailureConfig(max_failures=1)
    )
    assert result.return_value == 7


def test_a_rank_that_waits_for_one_that_has_returned_is_told_so(tmp_path: Path) -> None:
    def function() -> None:
        if get_context().get_world_rank() == 0:
            everstep.collective.barrier()

    with pytest.raises(WorkerGroupError, match="rank 0 waited in a barrier.*rank 1 will not come"):
        fit(function, tmp_path)


def test_a_function_that_leaves_by_sys_exit_has_saved_what_it_reported(tmp_path: Path) -> None:
    def function() -> None:
        leaving = threading.Event()

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            leaving.wait()
            return Checkpoint.from_directory(checkpoint.path)

        report(
            {"x": 1},
            checkpoint=save("last"),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=upload,
        )
        threading.Timer(0.5, leaving.set).start()
        sys.exit(0)

    result = fit(function, tmp_path, workers=1)
    assert result.checkpoint is not None
    assert result.error is None


def test_a_report_takes_a_checkpoint_or_a_state(tmp_path: Path) -> None:
    class Nothing:
        pass

    def function() -> None:
        report({}, checkpoint=save("x"), state=Nothing())  # type: ignore[arg-type]

    with pytest.raises(TrainingFailedError, match="is given a checkpoint and a state. Give the state"):
        fit(function, tmp_path, workers=1)


def test_callbacks_get_the_checkpoint_of_a_report(tmp_path: Path) -> None:
    class Watch(UserCallback):
        def __init__(self) -> None:
            self.saved: list[Any] = []

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            there = None if checkpoint is None else (Path(checkpoint.path) / "weights").read_text()
            self.saved.append((metrics[0]["step"], there))

    def function() -> None:
        for step in range(4):
            report({"step": step}, checkpoint=save(f"{step}") if step % 2 else None)
            everstep.collective.barrier()

    watch = Watch()
    fit(function, tmp_path, callbacks=[watch])
    assert sorted(watch.saved) == [(0, None), (1, "1"), (2, None), (3, "3")]
