"""TensorBoard. Needs ``everstep[tensorboard]``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everstep.callbacks import TrainRunContext
from everstep.config import DEFAULT_STORAGE_PATH
from everstep.integrations.tracker import LoggedRow, Tracker, require


class TensorBoardCallback(Tracker):
    """Writes what rank 0 reports as event files, one curve a metric.

    A restart or a take-over goes on behind what the files hold already.

    Args:
        logdir: The folder for the files, a folder of the run's own. By default ``tensorboard`` in the run's
            folder; for a run in an object store, ``~/everstep_results/NAME/tensorboard``.
        step_metric: The metric whose value is the step. By default reports are counted.
    """

    def __init__(
        self, logdir: str | os.PathLike[str] | None = None, *, step_metric: str | None = None
    ) -> None:
        require("tensorboard", "tensorboard", "TensorBoardCallback")
        super().__init__(step_metric)
        self.logdir = logdir
        self._writer: Any = None

    def open(self, run_context: TrainRunContext) -> int:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = self._folder(run_context)
        suffix = f".everstep-{run_context.run_id}"
        last = _last_step(sorted(folder.glob(f"events.out.tfevents.*{suffix}"), reverse=True))
        self._writer = EventFileWriter(str(folder), filename_suffix=suffix)
        return last

    def _folder(self, run_context: TrainRunContext) -> Path:
        if self.logdir is not None:
            return Path(self.logdir).expanduser()
        home = run_context.path
        if "://" in home:
            home = os.path.join(os.path.expanduser(DEFAULT_STORAGE_PATH), run_context.name)
        return Path(home) / "tensorboard"

    def log(self, rows: Sequence[LoggedRow]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            # One event a report: it is read whole or not at all.
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
            self._writer.add_event(Event(wall_time=time.time(), step=row.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, outcome: str) -> None:
        self._writer.close()


def _last_step(newest_first: Sequence[Path]) -> int:
    """Of what is in these files. Of one whose writer was killed, what is whole counts."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for path in newest_first:
        steps = [event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
        if steps:
            return int(max(steps))
    return 0
