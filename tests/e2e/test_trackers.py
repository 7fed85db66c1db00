"""TensorBoard, Weights & Biases and MLflow, through two restarts and a driver's death: one run, one curve.

All three follow the same run, which is driven twice; each test reads what one of them was given.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from everstep.integrations.wandb import records_in
from processes import LIMIT_S, ours, wait_for

from .watched import DEATHS, await_step, kill, result, start

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("mlflow", "tensorboard", "wandb")),
    reason="a tracker is not installed",
)

NAMES = {"step", "loss", "eval/acc"}
"""Of the metrics that are numbers."""

ARGUMENTS = f"callbacks=callbacks, deadlines=Deadlines(trackers_s={LIMIT_S})"
GIVEN = """
import atexit, os
from everstep.integrations.mlflow import MLflowCallback
from everstep.integrations.tensorboard import TensorBoardCallback
from everstep.integrations.wandb import WandbCallback

callbacks = [
    TensorBoardCallback(),
    WandbCallback("project", mode="offline", dir=str(HERE)),
    MLflowCallback("experiment", tracking_uri=(HERE / "mlruns").as_uri()),
]
atexit.register(lambda: print("left in the environment:", os.environ.get("WANDB_SERVICE")))
"""


class Tracked(NamedTuple):
    folder: Path
    last: int
    """The step that training ended with."""

    @property
    def steps(self) -> list[int]:
        return list(range(1, self.last + 1))


def wandb_is_gone() -> bool:
    return not any("wandb-core" in command for command in ours().values())


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        # MLflow asks to be told that its folders, which need no server, are meant.
        patch.setitem(os.environ, "MLFLOW_ALLOW_FILE_STORE", "true")
        process = start(folder, ARGUMENTS, GIVEN)
        try:
            await_step(folder, max(DEATHS.values()) + 5, process)
            # It writes when it has a block full, and loses what it has besides.
            wait_for(lambda: bool(history_of(folder)), "what wandb writes")
            # Its folders are damaged for good by a kill in the middle of making a run.
            wait_for(lambda: any(folder.glob("mlruns/*/*/metrics/loss")), "what MLflow writes")
            kill(process)
            wait_for(wandb_is_gone, "the end of the process that writes for wandb")
            process = start(folder, ARGUMENTS, GIVEN)
            await_step(folder, result(folder).metrics_history[-1]["step"] + 20, process)
            (folder / "until").touch()
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        assert process.returncode == 0, output
        assert "took over 2 workers" in output
        assert "not logged everything" not in output
        assert "left in the environment: None" in output, "a worker would look for it"
        rows = [row["step"] for row in result(folder).metrics_history]
        assert len(rows) > len({*rows}), "steps were done again"
        yield Tracked(folder, rows[-1])


def test_tensorboard_shows_one_curve(tracked: Tracked) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logdir = tracked.folder / "runs" / "watched" / "tensorboard"
    assert len(list(logdir.iterdir())) == 2, "a file for each driver"
    shown = EventAccumulator(str(logdir), size_guidance={"scalars": 0})
    shown.Reload()
    assert {*shown.Tags()["scalars"]} == NAMES
    for name in NAMES:
        assert [event.step for event in shown.Scalars(name)] == tracked.steps
    assert [event.value for event in shown.Scalars("step")] == tracked.steps


def test_wandb_has_one_run_with_each_step_once(tracked: Tracked) -> None:
    runs = [record.run for record in wandb_records(tracked.folder) if record.HasField("run")]
    assert len(runs) == 2, "a file for each driver"
    ((_, name, project),) = {(run.run_id, run.display_name, run.project) for run in runs}
    assert (name, project) == ("watched", "project")
    rows = history_of(tracked.folder)
    assert [row["_step"] for row in rows] == tracked.steps
    assert [row["step"] for row in rows] == tracked.steps
    assert {name for row in rows for name in row if not name.startswith("_")} == NAMES


def history_of(folder: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in wandb_records(folder) if record.HasField("history")]
    return [{item.nested_key[0]: json.loads(item.value_json) for item in row} for row in rows]


def wandb_records(folder: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for body in records_in(path.read_bytes()):
            found.append(Record())
            found[-1].ParseFromString(body)
    return found


def test_mlflow_has_one_run_with_each_step_once(tracked: Tracked) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((tracked.folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("watched", "FINISHED")
    assert run.data.params == {"until": str(tracked.folder / "until")}
    assert {*run.data.metrics} == NAMES
    for name in NAMES:
        assert [metric.step for metric in client.get_metric_history(run.info.run_id, name)] == tracked.steps
