"""What a training function calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from everstep.checkpoint import (
    Checkpoint,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
)
from everstep.context import TrainContext
from everstep.errors import ConfigError
from everstep.health.vitals import Stage
from everstep.process.current import current
from everstep.snapshots.content import Restorable
from everstep.validation import BY_DEFAULT, ValidationTaskConfig
from everstep.worker.session import Session
from everstep.worker.uploads import kind_of

if TYPE_CHECKING:
    from everstep.preemption import PreemptionInfo


def report(
    metrics: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    validation: bool | ValidationTaskConfig = False,
    *,
    state: Restorable | None = None,
    step: int | None = None,
) -> None:
    """Report metrics, and optionally this rank's part of a checkpoint, or the training state.

    The k-th report of every rank forms one. It isn't a barrier: a rank waits for its own upload at most. Rank
    0's metrics are the run's.

    With ``checkpoint_upload_mode=ASYNC`` the upload goes on behind training's back, also that of a
    ``checkpoint_upload_fn``. What such a function raises there is raised by the next ``report``, or when the
    training function returns; what it has not uploaded yet is lost with its process.

    With ``state`` (an ``everstep.torch.State`` or ``everstep.jax.State``) and ``step``, the number of the
    step that is done, Everstep decides when the state is written to storage. Every rank gives it.

    With ``validation``, the function of ``Trainer(validation_config=…)`` is called with the checkpoint once
    it is committed, while training goes on. What it returns is added to the checkpoint's metrics. One rank
    may ask for it, or all.
    """
    session = current("report")
    asked = _asked(validation, checkpoint, session) if validation is not False else b""
    if checkpoint is not None:
        _check_kind("checkpoint", checkpoint, Checkpoint)
    if checkpoint_dir_name is not None and not isinstance(checkpoint_dir_name, str):
        raise _other_kind("checkpoint_dir_name", checkpoint_dir_name, "a text")
    _check_kind("checkpoint_upload_mode", checkpoint_upload_mode, CheckpointUploadMode)
    if checkpoint_upload_fn is not None and not callable(checkpoint_upload_fn):
        raise _other_kind("checkpoint_upload_fn", checkpoint_upload_fn, "a function")
    if checkpoint is None and state is None:
        session.reporting.report_metrics(metrics)
        return
    if checkpoint is not None and state is not None:
        raise ConfigError(
            "report() is given a checkpoint and a state",
            "give the state, and Everstep decides when it becomes a checkpoint; or the checkpoint alone",
            "report.state",
        )
    session.reporting.report(
        metrics,
        checkpoint,
        checkpoint_dir_name,
        checkpoint_upload_mode,
        delete_local_checkpoint_after_upload,
        checkpoint_upload_fn,
        asked,
        state,
        step,
    )


def heartbeat() -> None:
    """Say that training gets on, between reports that are far apart. It costs less than a microsecond.

    A worker that neither reports nor calls this for longer than usual, and does nothing else either, counts
    as hung: ``FailureConfig(on_hang=…)``.
    """
    current("heartbeat").progress.beat()


@contextmanager
def pause(what: str, timeout_s: float | None = None) -> Iterator[None]:
    """``with train.pause("eval"):`` something in which this rank makes no progress, as far as others can
    see. It counts as hung only after ``timeout_s``, or ``Deadlines.hang_pause_s``.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(
            f"pause(timeout_s={timeout_s!r})",
            "give a number of seconds above 0, or leave it out",
            "timeout_s",
        )
    session = current("pause")
    with session.progress.during(Stage.PAUSE, what, timeout_s or 0.0):
        yield
    session.times.spoil_step()


def _asked(validation: object, checkpoint: Checkpoint | None, session: Session) -> bytes:
    """How the checkpoint is to be validated."""
    if validation is not True:
        _check_kind("validation", validation, ValidationTaskConfig)
    if checkpoint is None:
        raise ConfigError(
            "report(validation=…) without a checkpoint: there is nothing to validate",
            "give report() the checkpoint, too",
            "report.validation",
        )
    if not session.spec.validates:
        raise ConfigError(
            "report(validation=…), and the trainer has no function that validates",
            "give it one: Trainer(validation_config=everstep.ValidationConfig(fn=…))",
            "Trainer.validation_config",
        )
    return validation.asked() if isinstance(validation, ValidationTaskConfig) else BY_DEFAULT


def _check_kind(argument: str, given: object, kind: type) -> None:
    """A script that was moved over in part may give Ray Train's, which looks the same and isn't."""
    if not isinstance(given, kind):
        raise _other_kind(argument, given, f"an everstep.{kind.__name__}")


def _other_kind(argument: str, given: object, expected: str) -> ConfigError:
    return ConfigError(
        f"report({argument}=…) is a {kind_of(given)}, expected {expected}",
        f"give {expected}",
        f"report.{argument}",
    )


def get_checkpoint() -> Checkpoint | None:
    """The newest committed checkpoint of the run, or None if there is none yet.

    Before the first report, that is the one to start from. After a report it is the checkpoint of that
    report, on every rank, also on those that had nothing to save: it waits for the other ranks to make the
    same report. Uploads in the background aren't waited for.
    """
    return current("get_checkpoint").restoring.checkpoint()


def get_context() -> TrainContext:
    """This worker's place in the run."""
    return current("get_context").context


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """This worker's share of a data set that the ``Trainer`` was given.

    Each loop over it is one pass, dealt to the workers in batches. Its place is saved with every checkpoint
    that is reported, so that after a restart, on any number of workers, each sample of the pass is seen
    once. A ``ray.data.Dataset`` gives Ray's own iterator, whose position isn't saved.
    """
    return current("get_dataset_shard").datasets.shard(dataset_name)


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """All checkpoints of the run that are kept, with rank 0's metrics, in the order of
    ``Result.best_checkpoints``.

    Waits until the reports that this rank has made are committed or given up, uploads in the background
    included, and with ``VALIDATED`` until no validation is to come either; at most ``timeout_s``, after which
    the list has what is committed by then. Without ``Trainer(validation_config=…)`` both modes mean the same.
    """
    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise ConfigError(
            f"consistency_mode is {consistency_mode!r}",
            "give CheckpointConsistencyMode.COMMITTED or CheckpointConsistencyMode.VALIDATED",
            "get_all_reported_checkpoints.consistency_mode",
        )
    validated = consistency_mode is CheckpointConsistencyMode.VALIDATED
    return current("get_all_reported_checkpoints").restoring.reported(validated, timeout_s)


def should_checkpoint() -> bool:
    """Whether Everstep would like a checkpoint now: before a resize, a preemption, a stop."""
    return bool(current("should_checkpoint").values.want_checkpoint.ask())


def get_preemption_info() -> PreemptionInfo | None:
    """What is known of machines that will be taken away, or None."""
    return current("get_preemption_info").values.preemption.ask()
