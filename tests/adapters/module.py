"""A small model that Lightning trains, and that notes which samples it has seen at which step."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

import everstep

from .notes import LIGHTNING_PACKAGE, disturb_save, disturbance, is_killed_at

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = importlib.import_module(os.environ.get(LIGHTNING_PACKAGE, "lightning.pytorch"))

from everstep import lightning as adapter

SAMPLES = 48


class Points(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4, generator=torch.Generator().manual_seed(i)), i


class DisturbsSave:
    """In a checkpoint, it is met when the file is there, and before it is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        disturb_save(self.step)
        return (DisturbsSave, (self.step,))


class Noting(pl.LightningModule):
    def __init__(self, notes: Path, config: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.notes, self.config = notes, config

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        points, numbers = batch
        loss: torch.Tensor = self.layers(points).square().mean()
        with self.notes.open("a") as file:
            file.write(f"{self.global_step} {loss.item():.10f} {' '.join(map(str, numbers.tolist()))}\n")
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if is_killed_at(self.config, self.global_step):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        disturbed = self.config["disturb_saves"] and self.global_rank == 0
        if disturbed and disturbance(self.global_step) is not None:
            checkpoint["disturbing"] = DisturbsSave(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(config: dict[str, Any]) -> None:
    context = everstep.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    ray = config["ray"]
    loader = DataLoader if ray else adapter.ResumableLoader
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices="auto" if ray else context.get_local_world_size(),
        num_nodes=1,
        strategy=adapter.RayDDPStrategy() if workers > 1 else "auto",
        plugins=[adapter.RayLightningEnvironment()],
        callbacks=[
            adapter.RayTrainReportCallback()
            if ray
            else adapter.ReportCallback(every_steps=config["every_steps"])
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=config["output"],
    )
    if workers > 1:
        trainer = adapter.prepare_trainer(trainer)
    model = Noting(Path(config["notes"], f"{rank}-{context.get_attempt()}"), config)
    torch.manual_seed(1 + rank)
    batches = loader(Points(), batch_size=4, shuffle=True)
    with adapter.newest_checkpoint() as path:
        trainer.fit(model, batches, ckpt_path=path)
