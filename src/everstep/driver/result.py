"""``Result``: what ``fit()`` gives back, from a run's history."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from everstep.checkpoint import Checkpoint, address_of
from everstep.errors import (
    ConfigError,
    NoCheckpointError,
    NoRunError,
    RefusedAttributeError,
    RefusedError,
    TrainingFailedError,
)
from everstep.journal.history import History, KeptCheckpoint, read_history
from everstep.protocol.metrics import find_metric
from everstep.storage.store import Store, open_store

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Result:
    """What a run came to. Metrics are rank 0's."""

    metrics: dict[str, Any] | None
    """The latest that were reported; ``None`` if none were."""
    checkpoint: Checkpoint | None
    """The newest that is committed."""
    error: TrainingFailedError | None
    """Why the run failed, if it did."""
    path: str
    """The run's folder."""
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)
    """Every checkpoint that was kept, with its metrics: the best last, by
    ``CheckpointConfig(checkpoint_score_attribute=…)``; without one, the newest.
    """
    metrics_history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Every report of the run, in order, across restarts."""
    return_value: Any = None
    """What the training function returned on rank 0."""
    goodput: float = 0.0
    """The share of all time, of all workers that were wanted, in steps that were not done again."""
    ledger: dict[str, float] = field(default_factory=dict, repr=False)
    """Where the time went: seconds by category, summed over workers. They add up to all there was."""
    unsaved_reports: list[int] = field(default_factory=list)
    """Reports of the last attempt whose checkpoints could not be saved, by number. Only ``fit()`` knows them:
    what is read back from storage has what is there.
    """

    @cached_property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """``metrics_history`` as a table, one row a report; ``None`` without any. Needs pandas."""
        if not self.metrics_history:
            return None
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "Result.metrics_dataframe needs pandas, which isn't installed. Run `pip install pandas`, or "
                "use Result.metrics_history, a list of dicts."
            ) from error
        return pandas.DataFrame(self.metrics_history)

    @property
    def config(self) -> NoReturn:
        """Ray Tune's; refused."""
        raise RefusedAttributeError(
            "Result.config is refused.", "Use the train_loop_config that you gave the trainer."
        )

    @property
    def filesystem(self) -> NoReturn:
        """Ray Train's; refused."""
        raise RefusedAttributeError("Result.filesystem is refused.", "Result.path is a plain path: use that.")

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint:
        """The kept checkpoint with the highest (``mode="max"``) or lowest (``"min"``) metric. NaN is worst.

        ``metric`` may name one in a nested dict: ``"eval/loss"``.
        """
        if mode not in ("max", "min"):
            raise ConfigError(f"mode is {mode!r}, expected 'max' or 'min'.", "Pick one of these.", "mode")
        if not self.best_checkpoints:
            raise NoCheckpointError(
                "The run has no checkpoint.", "Make one with everstep.report(metrics, checkpoint=…)."
            )
        scored = [
            (score, checkpoint)
            for checkpoint, metrics in self.best_checkpoints
            if (score := find_metric(metrics, metric)) is not None
        ]
        if not scored:
            known = (
                ", ".join(sorted({str(name) for _, metrics in self.best_checkpoints for name in metrics}))
                or "none"
            )
            raise NoCheckpointError(
                f"No checkpoint was reported with a metric {metric!r}. Those reported: {known}."
            )
        sign = 1 if mode == "max" else -1
        return max(scored, key=lambda pair: -math.inf if math.isnan(pair[0]) else sign * pair[0])[1]

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: None = None) -> Result:
        """The result of a run, read back from its folder."""
        if storage_filesystem is not None:
            raise RefusedError(
                f"Result.from_path(storage_filesystem={storage_filesystem!r}) is refused.",
                "Everstep takes no pyarrow filesystems: give a folder as the path instead.",
                "Result.from_path.storage_filesystem",
            )
        return load_result(address_of(path))


def result_of(store: Store, history: History, options: Mapping[str, str] | None = None) -> Result:
    """A run's result, from its history."""
    newest, opened = history.newest, history.opened
    ranked = history.ranked(opened.score, opened.score_order) if opened is not None else history.in_order()

    def checkpoint(kept: KeptCheckpoint) -> Checkpoint:
        return Checkpoint(kept.address(store), storage_options=options)

    rows: list[dict[str, Any]] = [msgspec.msgpack.decode(raw) for raw in history.metrics]
    ledger = history.ledger.until()
    return Result(
        metrics=_latest_metrics(history, rows),
        checkpoint=checkpoint(newest) if newest is not None else None,
        error=TrainingFailedError(history.message) if history.outcome == "failed" else None,
        path=store.address(),
        best_checkpoints=[(checkpoint(kept), kept.metrics) for kept in ranked],
        metrics_history=rows,
        return_value=msgspec.msgpack.decode(history.value) if history.value else None,
        goodput=ledger.goodput,
        ledger={category.value: seconds for category, seconds in ledger.total.items()},
    )


def _latest_metrics(history: History, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What was reported last; with what the validation of its checkpoint has found, if it has one."""
    newest = history.newest
    if not rows or newest is None:
        return rows[-1] if rows else newest.metrics if newest is not None else None
    ref, last = newest.ref, history.reported[-1]
    report = (last.epoch, last.group, last.generation, last.first + len(last.rows) - 1)
    is_its_own = report == (ref.epoch, ref.group, ref.generation, ref.index)
    return {**rows[-1], **newest.metrics} if is_its_own else rows[-1]


def load_result(path: str) -> Result:
    run = open_store(path)
    history = read_history(run)
    if history.owner is None:
        missing = run.is_local and not Path(path).is_dir()
        why = "there is no such folder" if missing else "it has no journal"
        raise NoRunError(
            f"{path} is not the folder of a run: {why}", "give the folder that Result.path names", "path"
        )
    return result_of(run, history)
