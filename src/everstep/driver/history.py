"""The state of a run, read back from its journal: to resume it, and for ``Result.from_path``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from everstep.checkpoint import Checkpoint, Result
from everstep.config import CheckpointConfig
from everstep.control.commands import GroupStarted, PhaseChanged, RecoveryDecided
from everstep.control.events import CheckpointRef
from everstep.control.failures import Budget
from everstep.driver import journal
from everstep.errors import ConfigError, TrainingFailedError


@dataclass
class Kept:
    """A committed checkpoint that retention has not removed."""

    ref: CheckpointRef
    metrics: dict[str, Any]
    external: str | None

    def address(self, run: Path) -> str:
        return self.external or str(run / self.ref.folder)


@dataclass
class History:
    lease: int = 0
    last_epoch: int = 0
    checkpoints: dict[str, Kept] = field(default_factory=dict)
    """In the order in which they were committed."""
    metrics: list[msgspec.Raw] = field(default_factory=list)
    outcome: str = ""
    message: str = ""
    value: bytes | None = None
    fingerprint: str = ""
    spent: dict[Budget, int] = field(default_factory=dict)
    """Of the budgets, since the run was last started (not taken over)."""
    _rows: dict[int, int] = field(default_factory=dict)
    """How many of ``metrics`` belong to an epoch."""

    def apply(self, record: journal.AnyRecord) -> None:
        """Take one record in. The driver does the same with what it writes: there is one way to the truth."""
        match record:
            case journal.Opened():
                self.lease = record.lease
                self.outcome = ""
                self.fingerprint = record.fingerprint
            case journal.Committed():
                ref = CheckpointRef(record.folder, record.epoch, record.index)
                self.checkpoints[record.folder] = Kept(
                    ref, msgspec.msgpack.decode(record.metrics), record.external
                )
                self.last_epoch = max(self.last_epoch, record.epoch)
            case journal.Deleted():
                self.checkpoints.pop(record.folder, None)
            case journal.Metrics():
                self.metrics.extend(record.rows)
                self._rows[record.epoch] = self._rows.get(record.epoch, 0) + len(record.rows)
                self.last_epoch = max(self.last_epoch, record.epoch)
            case journal.Closed():
                self.outcome, self.message, self.value = record.outcome, record.message, record.value
            case GroupStarted() | PhaseChanged():
                self.last_epoch = max(self.last_epoch, record.epoch)
            case RecoveryDecided():
                self.spent[Budget(record.budget)] = record.spent
            case _:
                pass

    def epoch_rows(self, epoch: int) -> list[msgspec.Raw]:
        """Rank 0's reports of an epoch, if it is the last that has any."""
        count = self._rows.get(epoch, 0)
        return self.metrics[-count:] if count and epoch == max(self._rows) else []

    @property
    def newest(self) -> Kept | None:
        return max(self.checkpoints.values(), key=lambda k: (k.ref.epoch, k.ref.index), default=None)


def read_history(run: Path) -> History:
    history = History()
    for record in journal.read(run):
        history.apply(record)
    # A start that never got as far as a record has used its number, too: its logs and names are there.
    for path in (run / "logs").glob("epoch-*"):
        history.last_epoch = max(history.last_epoch, int(path.name.split("-")[1].split(".")[0]))
    return history


def result_of(run: Path, history: History, config: CheckpointConfig | None = None) -> Result:
    """A run's result, from its history."""
    newest = history.newest
    rows: list[dict[str, Any]] = [msgspec.msgpack.decode(raw) for raw in history.metrics]
    return Result(
        metrics=newest.metrics if newest is not None and not rows else (rows[-1] if rows else None),
        checkpoint=Checkpoint(newest.address(run)) if newest is not None else None,
        error=TrainingFailedError(history.message) if history.outcome == "failed" else None,
        path=str(run),
        best_checkpoints=[(Checkpoint(k.address(run)), k.metrics) for k in history.checkpoints.values()],
        metrics_history=rows,
        return_value=msgspec.msgpack.decode(history.value) if history.value else None,
    )


def load_result(path: str) -> Result:
    run = Path(path)
    if not journal.segments(run):
        raise ConfigError(
            f"{path} is not the folder of a run: it has no journal", "give the folder that Result.path names"
        )
    return result_of(run, read_history(run))


def plain_value(value: Any) -> bytes | None:
    """A return value as the journal keeps it: numbers, text, lists and dicts. Anything else isn't kept:
    storage holds no pickles.
    """
    if value is None:
        return None
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError):
        return None


def to_delete(history: History, config: CheckpointConfig) -> list[str]:
    """The checkpoints that retention lets go of: the worst by score, or the oldest. Never the newest."""
    keep = config.num_to_keep
    newest = history.newest
    if keep is None or newest is None or len(history.checkpoints) <= keep:
        return []
    attribute = config.checkpoint_score_attribute
    sign = 1.0 if config.checkpoint_score_order == "max" else -1.0

    def worth(kept: Kept) -> tuple[float, int, int]:
        score = -math.inf
        if attribute is not None:
            value = kept.metrics.get(attribute)
            if isinstance(value, (int, float)) and not math.isnan(value):
                score = sign * value
        return (score, kept.ref.epoch, kept.ref.index)

    others = sorted((k for k in history.checkpoints.values() if k is not newest), key=worth, reverse=True)
    return [kept.ref.folder for kept in others[max(keep - 1, 0) :]]
