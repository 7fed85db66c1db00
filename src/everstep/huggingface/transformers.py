"""Transformers' ``Trainer`` inside a training function: what it saves are the run's checkpoints.

``RayTrainReportCallback`` and ``prepare_trainer`` have Ray Train's names and meanings. ``train`` is what we
would use ourselves: it saves as often as is wanted, and goes on in the middle of a pass.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

import everstep
from everstep.worker.datasets import is_rays
from everstep.worker.save_cadence import SaveCadence

CHECKPOINT_NAME = "checkpoint"
"""Transformers' own folder in a checkpoint of the run."""


class RayTrainReportCallback(TrainerCallback):  # type: ignore[misc]
    """Reports what the ``Trainer`` saves, when it saves, with all that it has logged.

    One rank of each host brings the host's files. As in Ray Train, they are in ``checkpoint/``::

        with everstep.get_checkpoint().as_directory() as folder:
            trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint"))
    """

    CHECKPOINT_NAME = CHECKPOINT_NAME
    """Transformers' own folder in a checkpoint."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        metrics = {name: value for entry in state.log_history for name, value in entry.items()}
        metrics["step"] = state.global_step
        if dist.is_available() and dist.is_initialized():
            dist.barrier()  # every rank of this host has written its files
        saved = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if everstep.get_context().get_local_rank() or not saved.is_dir():
            everstep.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, CHECKPOINT_NAME).symlink_to(saved.resolve())  # followed, so nothing is copied twice
            everstep.report(metrics, checkpoint=everstep.Checkpoint(folder))


class SaveEvery(TrainerCallback):  # type: ignore[misc]
    """Lets the ``Trainer`` save every so many steps or seconds, at the end of training, and whenever Everstep
    would like it to: before a machine is taken away, a resize, a stop.
    """

    def __init__(self, *, every_steps: int | None = None, every_s: float | None = None) -> None:
        self._cadence = SaveCadence(every_steps, every_s)
        self._saved: int | None = None
        """The step of the last save."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        due = self._cadence.is_due(state.global_step)
        if everstep.should_checkpoint() or due:
            control.should_save = True
        return self._save_the_last(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self._save_the_last(state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self._save_the_last(state, control)  # an evaluation may end training early

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._saved = state.global_step

    def _save_the_last(self, state: TrainerState, control: TrainerControl) -> TrainerControl:
        if control.should_training_stop and self._saved != state.global_step:
            control.should_save = True
        return control


def train(trainer: Trainer, *, every_steps: int | None = None, every_s: float | None = None) -> TrainOutput:
    """``trainer.train()``, from the newest checkpoint on, and in the middle of a pass if it was saved there.

    Model, optimizer, scheduler and the states of random generators come back; batches that were trained on
    are passed over (as long as ``TrainingArguments.ignore_data_skip`` isn't set, and with as many workers as
    before). A checkpoint is saved at the end of training, too.

    Args:
        trainer: Yours, with ``save_strategy="no"`` if it shall save at no other time.
        every_steps: Save after so many steps.
        every_s: Save after so many seconds. By default 60, where ``every_steps`` isn't given.
    """
    if every_steps is None and every_s is None:
        every_s = 60.0
    trainer.add_callback(SaveEvery(every_steps=every_steps, every_s=every_s))
    if not any(isinstance(c, RayTrainReportCallback) for c in trainer.callback_handler.callbacks):
        trainer.add_callback(RayTrainReportCallback())
    checkpoint = everstep.get_checkpoint()
    if checkpoint is None:
        return trainer.train()
    with checkpoint.as_directory() as folder:
        return trainer.train(resume_from_checkpoint=str(Path(folder, CHECKPOINT_NAME)))


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Let it take batches of a ``ray.data.Dataset``: ``get_dataset_shard("train").iter_torch_batches(…)`` as
    ``train_dataset`` or ``eval_dataset``. All other data sets are taken as they are.
    """
    base: type[Trainer] = type(trainer)

    class TrainerOfBatches(base):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader[Any]:
            if is_rays(self.train_dataset):
                return _loader_of(self.train_dataset)
            return super().get_train_dataloader()

        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
            chosen = self.eval_dataset if eval_dataset is None else eval_dataset
            if isinstance(chosen, str):
                chosen = self.eval_dataset[chosen]
            if is_rays(chosen):
                return _loader_of(chosen)
            return super().get_eval_dataloader(eval_dataset)

    trainer.__class__ = TrainerOfBatches
    return trainer


class _Batches(IterableDataset[Any]):  # type: ignore[misc]
    """What comes in batches already."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _loader_of(batches: Iterable[Any]) -> DataLoader[Any]:
    return DataLoader(_Batches(batches), batch_size=None)
