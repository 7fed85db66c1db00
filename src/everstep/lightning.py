"""Lightning inside a training function: what its ``Trainer`` saves are the run's checkpoints.

The names that begin with ``Ray``, and ``prepare_trainer``, have Ray Train's meanings. ``ReportCallback``,
``ResumableLoader`` and ``newest_checkpoint`` are what we would use ourselves: they save as often as is
wanted, and go on in the middle of a pass.

Lightning comes as two packages with the same content, whose classes don't mix: ``lightning`` and
``pytorch_lightning``. What is here is made of the one that the script has imported, or else of the one that
is installed; ``lightning`` where that leaves a choice.
"""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import everstep
from everstep.checkpoint import CheckpointUploadMode
from everstep.errors import ConfigError
from everstep.torch import get_device
from everstep.torch.resumable import ResumableLoader
from everstep.worker.save_cadence import SaveCadence

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
else:
    _other = "pytorch_lightning"
    _imported = _other in sys.modules and "lightning.pytorch" not in sys.modules
    _alone = find_spec("lightning") is None and find_spec(_other) is not None
    _package = _other if _imported or _alone else "lightning.pytorch"
    pl = importlib.import_module(_package)
    LightningEnvironment = importlib.import_module(f"{_package}.plugins.environments").LightningEnvironment
    _strategies = importlib.import_module(f"{_package}.strategies")
    DDPStrategy, FSDPStrategy = _strategies.DDPStrategy, _strategies.FSDPStrategy

__all__ = [
    "RayDDPStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "ReportCallback",
    "ResumableLoader",
    "newest_checkpoint",
    "prepare_trainer",
]

Validation = bool | everstep.ValidationTaskConfig

CHECKPOINT_NAME = "checkpoint.ckpt"
"""Lightning's own file in a checkpoint of the run."""


class _OnOurWorkers:
    """The process group is there already, and each worker has a device of its own."""

    world_size: int
    global_rank: int

    @property
    def root_device(self) -> torch.device:
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class RayDDPStrategy(_OnOurWorkers, DDPStrategy):  # type: ignore[misc]
    """Lightning's ``DDPStrategy`` on Everstep's workers."""


class RayFSDPStrategy(_OnOurWorkers, FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` on Everstep's workers."""


class RayLightningEnvironment(LightningEnvironment):  # type: ignore[misc]
    """Tells Lightning which worker this is."""

    def world_size(self) -> int:
        return everstep.get_context().get_world_size()

    def global_rank(self) -> int:
        return everstep.get_context().get_world_rank()

    def local_rank(self) -> int:
        return everstep.get_context().get_local_rank()

    def node_rank(self) -> int:
        return everstep.get_context().get_node_rank()

    def set_world_size(self, size: int) -> None:
        pass  # it is the run's

    def set_global_rank(self, rank: int) -> None:
        pass

    def teardown(self) -> None:
        pass


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Check that a ``Trainer`` was made for Everstep's workers."""
    if not isinstance(trainer.strategy, _OnOurWorkers):
        raise ConfigError(
            f"Trainer.strategy is a {type(trainer.strategy).__name__}, expected one for Everstep's workers.",
            "Give strategy=everstep.lightning.RayDDPStrategy() or RayFSDPStrategy().",
            "Trainer.strategy",
        )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and not isinstance(environment, RayLightningEnvironment):
        raise ConfigError(
            f"Trainer has the environment {type(environment).__name__}, expected RayLightningEnvironment.",
            "Give plugins=[everstep.lightning.RayLightningEnvironment()].",
            "Trainer.plugins",
        )
    return trainer


def _save(trainer: pl.Trainer, mode: CheckpointUploadMode, validation: Validation = False) -> None:
    """Every rank takes part: Lightning writes one file for all of them, or a folder of shards; the states of
    random generators are each rank's own.
    """
    metrics = {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}
    folder = tempfile.mkdtemp(prefix="everstep-lightning-")
    trainer.save_checkpoint(Path(folder, CHECKPOINT_NAME), weights_only=False)
    torch.save(_random_states(), _random_file(folder))
    everstep.report(
        {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()},
        checkpoint=everstep.Checkpoint(folder),
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=True,
        validation=validation,
    )


def _random_file(folder: str | Path) -> Path:
    return Path(folder, f"random-{everstep.get_context().get_world_rank()}.pt")


def _random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _count_pass_as_begun(trainer: pl.Trainer) -> None:
    """From a checkpoint of a pass's last batch, Lightning goes on with the next pass and doesn't count that
    as begun. Checkpoints in the middle of it would be taken for ones between two passes.
    """
    progress = trainer.fit_loop.epoch_progress
    is_over = progress.current.completed == progress.current.ready
    if getattr(trainer.fit_loop, "restarted_mid_epoch", False) and is_over:
        progress.increment_ready()
        progress.increment_started()


class RayTrainReportCallback(pl.Callback):  # type: ignore[misc]
    """Saves and reports at the end of every pass.

    Args:
        checkpoint_upload_mode: As for ``everstep.report``.
        validation: As for ``everstep.report``: each checkpoint is validated beside training.
    """

    CHECKPOINT_NAME = CHECKPOINT_NAME
    """Lightning's own file in a checkpoint."""

    def __init__(
        self, checkpoint_upload_mode: CheckpointUploadMode | None = None, validation: Validation = False
    ) -> None:
        self._mode = checkpoint_upload_mode or CheckpointUploadMode.SYNC
        self._validation = validation

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _save(trainer, self._mode, self._validation)


class ReportCallback(pl.Callback):  # type: ignore[misc]
    """Saves and reports every so many steps or seconds, at the end of training, and whenever Everstep would
    like it to: before a machine is taken away, a resize, a stop. After a restart, random generators go on
    where they were.

    Args:
        every_steps: Optimizer steps between two checkpoints.
        every_s: Seconds between two checkpoints. By default 60, where ``every_steps`` isn't given.
        checkpoint_upload_mode: As for ``everstep.report``.
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    ) -> None:
        if every_steps is None and every_s is None:
            every_s = 60.0
        self._cadence = SaveCadence(every_steps, every_s)
        self._mode = checkpoint_upload_mode
        self._step = -1
        self._saved = -1
        """The step of the last save, or that at which training began here."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = self._saved = trainer.global_step
        _count_pass_as_begun(trainer)
        saved = _random_file(Path(trainer.ckpt_path).parent) if trainer.ckpt_path else None
        if saved is not None and saved.is_file():
            _set_random_states(torch.load(saved, weights_only=False))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients were accumulated
        self._step = trainer.global_step
        due = self._cadence.is_due(self._step)
        if everstep.should_checkpoint() or due:
            self._saved = self._step
            _save(trainer, self._mode)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step != self._saved:
            _save(trainer, self._mode)


@contextmanager
def newest_checkpoint() -> Iterator[str | None]:
    """What to give to ``trainer.fit(…, ckpt_path=…)``: the newest checkpoint's file, or None."""
    checkpoint = everstep.get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield str(Path(folder, CHECKPOINT_NAME))
