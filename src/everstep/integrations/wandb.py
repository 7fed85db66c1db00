"""Weights & Biases. Needs ``everstep[wandb]``."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep.callbacks import TrainRunContext
from everstep.errors import ConfigError
from everstep.integrations.tracker import LoggedRow, Tracker, plain_config, require

__all__ = ["WandbCallback"]

_OURS = ("id", "resume", "reinit", "name")
_SERVICE = "WANDB_SERVICE"
"""Where wandb's own process is reached; child processes would use the same."""
_MAGIC = b":W&B"
_HEADER = 7
_BLOCK = 32768
_CHUNK = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


class WandbCallback(Tracker):
    """Logs what rank 0 reports to one run of Weights & Biases, also across restarts and take-overs.

    Its id is the run's own (``TrainRunContext.run_id``), its name the run's name, and its config what of
    ``train_loop_config`` is numbers and text.

    Args:
        project: The project of Weights & Biases.
        step_metric: The metric whose value is the step. By default reports are counted.
        init: More arguments of ``wandb.init``: ``entity``, ``group``, ``tags``, ``mode``, ``dir``,
            ``settings``, …
    """

    def __init__(self, project: str | None = None, *, step_metric: str | None = None, **init: Any) -> None:
        require("wandb", "wandb", "WandbCallback")
        super().__init__(step_metric)
        refused = [name for name in _OURS if name in init]
        if refused:
            raise ConfigError(
                f"WandbCallback({refused[0]}) can't be given: it follows from the run.",
                "Leave it out. RunConfig(name=…) names the run.",
                f"WandbCallback.{refused[0]}",
            )
        self.project = project
        self.init = init
        self._run: Any = None

    def open(self, run_context: TrainRunContext) -> int:
        import wandb

        inherited = os.environ.get(_SERVICE)
        self._run = wandb.init(
            project=self.project,
            id=run_context.run_id,
            name=run_context.name,
            resume="allow",
            reinit="create_new",  # what the script itself logs elsewhere is left alone
            **{**self.init, "config": {**plain_config(run_context.train_loop_config), **self._own_config()}},
        )
        if inherited is None:
            # Workers outlive this process, and must not look for what ends with it.
            os.environ.pop(_SERVICE, None)
        # Online, the server says where to go on; offline, the files do.
        return max(int(self._run.starting_step) - 1, _last_step_offline(self._run), 0)

    def _own_config(self) -> dict[str, Any]:
        return dict(self.init.get("config") or {})

    def log(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            self._run.log(dict(row.metrics), step=row.step, commit=True)

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


def _last_step_offline(run: Any) -> int:
    """Of what earlier drivers have logged to files beside this run's."""
    own = Path(run.settings.sync_file)
    earlier = own.parent.parent.glob(f"offline-run-*-{run.id}/run-{run.id}.wandb")
    return max((_last_step(path.read_bytes()) for path in earlier if path != own), default=0)


def _last_step(data: bytes) -> int:
    from wandb.proto.wandb_internal_pb2 import Record

    last = 0
    for body in records_in(data):
        record = Record()
        record.ParseFromString(body)
        if record.WhichOneof("record_type") == "history":
            last = max(last, record.history.step.num)
    return last


def records_in(data: bytes) -> Iterator[bytes]:
    """The records of an offline run's file: after a header, LevelDB's log format, blocks of 32 KiB in which a
    record may be cut into chunks. Where its writer was killed, it ends in the middle.
    """
    if not data.startswith(_MAGIC):
        return
    at, record = _HEADER, b""
    while at + _CHUNK.size <= len(data):
        room = _BLOCK - at % _BLOCK
        if room < _CHUNK.size:
            at += room
            continue
        _, length, kind = _CHUNK.unpack_from(data, at)
        body = data[at + _CHUNK.size : at + _CHUNK.size + length]
        if kind == 0 or len(body) < length:
            return
        at += _CHUNK.size + length
        record += body
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
