"""MLflow. Needs ``everstep[mlflow]``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.callbacks import TrainRunContext
from everstep.integrations.tracker import LoggedRow, Tracker, plain_config, require

_TAG = "everstep.run_id"
_MOST = 1000
"""Metrics that MLflow takes at once."""
_MOST_PARAMS = 100
_LONGEST_PARAM = 500
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflowCallback(Tracker):
    """Logs what rank 0 reports to one run of MLflow, also across restarts and take-overs.

    The run has the tag ``everstep.run_id``, by which later drivers find it, and what of ``train_loop_config``
    is numbers and text as parameters.

    Args:
        experiment: The experiment of MLflow; it is made if it isn't there.
        tracking_uri: Where MLflow keeps it. By default ``MLFLOW_TRACKING_URI``, or what
            ``mlflow.set_tracking_uri`` was given.
        step_metric: The metric whose value is the step. By default reports are counted.
    """

    def __init__(
        self,
        experiment: str = "everstep",
        *,
        tracking_uri: str | None = None,
        step_metric: str | None = None,
    ) -> None:
        require("mlflow", "mlflow", "MLflowCallback")
        super().__init__(step_metric)
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self._client: Any = None
        self._run_id = ""
        self._logged: dict[str, int] = {}
        """The last step of each metric. A driver may have died between two metrics of one step."""

    def open(self, run_context: TrainRunContext) -> int:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self.tracking_uri)
        run = self._found(run_context.run_id) or self._made(run_context)
        self._run_id = run.info.run_id
        self._log_params(plain_config(run_context.train_loop_config), run.data.params)
        self._logged = {name: self._last_step(name) for name in run.data.metrics}
        return 0  # of a metric that isn't there, nothing was logged: ``log`` looks at each

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        return str(found.experiment_id if found else self._client.create_experiment(self.experiment))

    def _found(self, run_id: str) -> Any:
        found = self._client.search_runs(
            [self._experiment_id()], f"tags.`{_TAG}` = '{run_id}'", max_results=1
        )
        if not found:
            return None
        self._client.update_run(found[0].info.run_id, status="RUNNING")
        return found[0]

    def _made(self, run_context: TrainRunContext) -> Any:
        tags = {_TAG: run_context.run_id}
        return self._client.create_run(self._experiment_id(), tags=tags, run_name=run_context.name)

    def _log_params(self, config: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Those that aren't there: MLflow lets none change, and a driver may have died before this."""
        from mlflow.entities import Param

        params = [
            Param(_allowed(name), str(value)[:_LONGEST_PARAM])
            for name, value in config.items()
            if _allowed(name) not in known
        ]
        for at in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[at : at + _MOST_PARAMS])

    def _last_step(self, name: str) -> int:
        history = self._client.get_metric_history(self._run_id, name)
        return max((int(metric.step) for metric in history), default=0)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        new = [
            Metric(_allowed(name), value, now, row.step)
            for row in rows
            for name, value in row.metrics.items()
            if row.step > self._logged.get(_allowed(name), 0)
        ]
        for at in range(0, len(new), _MOST):
            self._client.log_batch(self._run_id, metrics=new[at : at + _MOST])

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS[outcome])


def _allowed(name: str) -> str:
    """MLflow takes letters, digits and a few signs."""
    return re.sub(r"[^\w\-. /]", "_", name)
