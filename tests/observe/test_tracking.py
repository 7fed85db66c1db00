"""What trackers are given of a run: each step once, in order, whatever restarts and whatever fails."""

from __future__ import annotations

import importlib
import logging
import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep import ConfigError, Deadlines, FailureConfig, RunConfig, ScalingConfig, Trainer, report
from everstep.callbacks import TrainRunContext
from everstep.control import commands as c
from everstep.integrations.tracker import LoggedRow, Tracker
from everstep.journal import records
from everstep.journal.history import History
from everstep.observe.tracking import TrackedRows, tracked
from everstep.saved.snapshots import At
from processes import wait_for

OWNER = records.Owner("host", "boot", 1, 1)
OPENED = records.Opened(records.FORMAT, 1, OWNER, 0.0, 0.0, "0", "run", 1, 1, "", "", "nonce")


class Recording(Tracker):
    """Keeps what it is given, as a server would that outlives drivers."""

    def __init__(self, step_metric: str | None = None) -> None:
        super().__init__(step_metric)
        self.rows: list[LoggedRow] = []
        self.opened = 0
        self.outcome = ""
        self.fails = 0
        """So many times, after it has taken one row of those that it is given."""

    def open(self, run_context: TrainRunContext) -> int:
        self.opened += 1
        return self.rows[-1].step if self.rows else 0

    def log(self, rows: Sequence[LoggedRow]) -> None:
        if self.fails:
            self.fails -= 1
            self.rows.append(rows[0])
            raise ConnectionError("no route")
        self.rows += rows

    def close(self, outcome: str) -> None:
        self.outcome = outcome

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


def rows(first: int, *values: dict[str, Any], epoch: int = 1, generation: int = 0) -> records.Metrics:
    encoded = [msgspec.Raw(msgspec.msgpack.encode(value)) for value in values]
    return records.Metrics(epoch, first, encoded, 0, generation)


def losses(first: int, count: int, epoch: int = 1) -> records.Metrics:
    return rows(first, *({"loss": 1.0 / n} for n in range(1, count + 1)), epoch=epoch)


def started(epoch: int, checkpoint: str | None = None, snapshot: At | None = None) -> c.GroupStarted:
    rung = c.Rung.RESTART_IN_PLACE
    return c.GroupStarted(9.0, epoch, ((0, 0),), 1, 1, rung, "", checkpoint, snapshot is not None, snapshot)


def committed(folder: str, index: int, epoch: int = 1) -> records.Committed:
    return records.Committed(1.0, folder, epoch, index, msgspec.Raw(b"\x80"), None)


def steps(history: History, last: int = 0, step_metric: str | None = None) -> list[int]:
    return [row.step for row in TrackedRows(history, last, step_metric).take(10_000)]


def context(tracker: Tracker, **limits: float) -> TrainRunContext:
    config = RunConfig(callbacks=[tracker], deadlines=Deadlines(**limits))  # type: ignore[arg-type]
    return TrainRunContext("id", config, ScalingConfig(), None, None, "run", "/run")


# ---------------------------------------------------------------------- which steps


def test_steps_that_a_restart_does_again_are_taken_once() -> None:
    history = History.of(
        [
            OPENED,
            losses(1, 6),
            committed("saved", 4),
            losses(7, 2),
            started(2, "saved"),
            losses(1, 9, epoch=2),
        ]
    )
    assert history.numbers == [1, 7, 5]
    assert steps(history) == list(range(1, 14))


def test_a_restart_from_memory_goes_on_from_its_snapshot() -> None:
    history = History.of(
        [
            OPENED,
            losses(1, 6),
            started(2, None, At(1, 5)),
            losses(1, 3, epoch=2),
            started(3, None, At(2, 2)),
            losses(1, 2, epoch=3),
        ]
    )
    assert history.numbers == [1, 6, 8]
    assert steps(history) == list(range(1, 10))


def test_a_journal_that_is_started_anew_keeps_the_numbers() -> None:
    history = History.of(
        [
            OPENED,
            losses(1, 6),
            committed("a", 4),
            started(2, "a"),
            losses(1, 9, epoch=2),
            committed("b", 9, 2),
        ]
    )
    again = History.of(history.as_records())
    for log in (history, again):
        log.apply(started(3, "b"))
        log.apply(losses(1, 1, epoch=3))
    assert again.numbers == history.numbers == [1, 5, 14]


def test_what_a_tracker_has_is_not_taken_again() -> None:
    history = History.of([OPENED, losses(1, 6), losses(7, 2)])
    assert steps(history, last=4) == [5, 6, 7, 8]
    assert steps(history, last=8) == []


def test_a_metric_may_say_the_step() -> None:
    history = History.of(
        [
            OPENED,
            rows(1, {"step": 100}, {"step": 200, "loss": 1}, {"loss": 2}, {"step": 300}),
            rows(1, {"step": 200}, {"step": 300}, {"step": 400.0}, {"step": math.nan}, epoch=2),
        ]
    )
    assert steps(history, step_metric="step") == [100, 200, 300, 400]
    assert steps(history, last=200, step_metric="step") == [300, 400]


def test_numbers_alone_are_taken_and_nested_ones_are_named_by_their_path() -> None:
    odd = {"loss": 1, "eval": {"acc": 0.5, "text": "no"}, "ok": True, "none": None, "list": [1]}
    history = History.of([OPENED, rows(1, odd, {"note": "nothing to draw"}, {"loss": 2})])
    found = TrackedRows(history, 0, None).take(10)
    assert found == [LoggedRow(1, {"loss": 1.0, "eval/acc": 0.5}), LoggedRow(3, {"loss": 2.0})]


def test_rows_are_taken_in_parts() -> None:
    source = TrackedRows(History.of([OPENED, losses(1, 6), losses(7, 2)]), 0, None)
    assert [[row.step for row in source.take(3)] for _ in range(4)] == [[1, 2, 3], [4, 5, 6], [7, 8], []]


# ---------------------------------------------------------------------- following a run


def test_what_comes_is_logged_and_the_end_is_told() -> None:
    tracker, history = Recording(), History.of([OPENED, losses(1, 3)])
    with tracked(history, context(tracker)):
        wait_for(lambda: tracker.steps == [1, 2, 3], "what was there")
        history.apply(losses(4, 2))
        history.apply(records.Closed(9.0, "finished", "", None))
    assert tracker.steps == [1, 2, 3, 4, 5]
    assert (tracker.opened, tracker.outcome) == (1, "finished")
    assert not [thread for thread in threading.enumerate() if thread.name == "Recording"]


def test_a_tracker_that_fails_is_opened_again_and_misses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tracker, history = Recording(), History.of([OPENED, losses(1, 5)])
    tracker.fails = 2
    with caplog.at_level(logging.WARNING, "everstep"), tracked(history, context(tracker)):
        wait_for(lambda: len(tracker.rows) == 5, "all of it")
        history.apply(records.Closed(9.0, "failed", "", None))
    assert tracker.steps == [1, 2, 3, 4, 5]
    assert (tracker.opened, tracker.outcome) == (3, "failed")
    assert "Recording: ConnectionError: no route; training goes on" in caplog.text


def test_a_driver_that_was_replaced_does_not_end_what_another_goes_on_with() -> None:
    tracker, history = Recording(), History.of([OPENED, losses(1, 2)])
    with tracked(history, context(tracker)):
        pass
    assert tracker.steps == [1, 2]
    assert tracker.outcome == ""


def test_a_tracker_that_hangs_does_not_keep_a_run_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()

    class Stuck(Recording):
        def log(self, rows: Sequence[LoggedRow]) -> None:
            released.wait()

    with tracked(History.of([OPENED, losses(1, 2)]), context(Stuck(), trackers_s=0.01)):
        pass
    released.set()
    assert "Stuck has not logged everything in time (Deadlines.trackers_s)" in caplog.text


def test_a_run_that_fails_is_told_as_failed_and_is_one_with_the_run_that_goes_on(tmp_path: Path) -> None:
    ids = []

    class Keeping(Recording):
        def open(self, run_context: TrainRunContext) -> int:
            ids.append((run_context.run_id, run_context.name, run_context.path))
            return super().open(run_context)

    tracker = Keeping()
    broken = tmp_path / "broken"
    broken.touch()

    def train() -> None:
        report({"loss": 1.0})
        report({"loss": 0.5})
        if broken.exists():
            raise RuntimeError("no")
        report({"loss": 0.25})

    config = RunConfig(
        name="run",
        storage_path=str(tmp_path),
        callbacks=[tracker],
        failure_config=FailureConfig(max_failures=0),
    )
    here = ScalingConfig(num_workers=0)
    with pytest.raises(Exception, match="no"):
        Trainer(train, scaling_config=here, run_config=config).fit()
    assert (tracker.steps, tracker.outcome) == ([1, 2], "failed")
    broken.unlink()
    Trainer(train, scaling_config=here, run_config=config).fit()
    assert (tracker.steps, tracker.outcome) == ([1, 2, 3], "finished")
    assert len(ids) == 2
    ((_, name, path),) = {*ids}
    assert (name, path) == ("run", str(tmp_path / "run"))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("written", [0, 1, 2])
def test_mlflow_is_given_what_a_killed_driver_left_out_of_a_step(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics are written one after the other: of the last, a killed driver may have written some or none."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    from everstep.integrations.mlflow import MLflowCallback

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    history = History.of([OPENED, rows(1, *({"loss": 1.0, "acc": 2.0} for _ in range(3)))])
    for _ in range(2):
        with tracked(history, context(MLflowCallback("experiment", tracking_uri=uri))):
            pass
        (acc,) = tmp_path.glob("mlruns/*/*/metrics/acc")
        lines = acc.read_text().splitlines(keepends=True)
        assert len(lines) == 3
        acc.write_text("".join(lines[:written])) if written else acc.unlink()
    with tracked(history, context(MLflowCallback("experiment", tracking_uri=uri))):
        pass
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    for name in ("loss", "acc"):
        assert [metric.step for metric in client.get_metric_history(run.info.run_id, name)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("package", "callback"),
    [("tensorboard", "TensorBoardCallback"), ("wandb", "WandbCallback"), ("mlflow", "MLflowCallback")],
)
def test_a_package_that_is_missing_is_told_in_a_line(
    package: str, callback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = getattr(importlib.import_module(f"everstep.integrations.{package}"), callback)
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError) as raised:
        made()
    told = (
        f"{callback} needs {package}, which is not installed. Install it: pip install 'everstep[{package}]'."
    )
    assert str(raised.value) == told


@pytest.mark.parametrize("name", ["id", "resume", "reinit", "name"])
def test_what_follows_from_the_run_can_not_be_given_to_wandb(name: str) -> None:
    pytest.importorskip("wandb")
    from everstep.integrations.wandb import WandbCallback

    with pytest.raises(ConfigError, match=rf"WandbCallback\({name}\) can't be given"):
        WandbCallback(**{name: "x"})


@pytest.mark.parametrize("step_metric", ["", 3])
def test_a_step_metric_is_a_name(step_metric: Any) -> None:
    with pytest.raises(ConfigError, match="expected the name of a metric"):
        Recording(step_metric)
