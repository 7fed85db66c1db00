"""A small language model that Transformers trains, and that notes which samples it has seen at which step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import everstep
from everstep.huggingface import transformers as adapter

from .notes import disturb_save, is_killed_at

SAMPLES, LENGTH = 48, 8


class Words(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        words = torch.randint(0, 50, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": words, "labels": words, "number": torch.tensor(i)}


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=1, bos_token_id=0)
    return GPT2LMHeadModel(config)


class Noting(Trainer):
    """Notes the numbers of the samples of each batch."""

    notes: Path
    disturb_saves: bool

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.disturb_saves and self.args.process_index == 0:
            disturb_save(self.state.global_step)  # when the model is written, and nothing else
        super()._save_optimizer_and_scheduler(output_dir)

    def training_step(self, model: Any, inputs: dict[str, Any], *more: Any, **named: Any) -> Any:
        numbers = inputs.pop("number").tolist()
        loss = super().training_step(model, inputs, *more, **named)
        with self.notes.open("a") as file:
            file.write(f"{self.state.global_step} {loss.item():.10f} {' '.join(map(str, numbers))}\n")
        return loss


class KillAt(TrainerCallback):
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if is_killed_at(self.config, state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


def fine_tune(config: dict[str, Any]) -> None:
    rank = everstep.get_context().get_world_rank()
    trainer = Noting(
        model=small_model(),
        args=TrainingArguments(
            output_dir=config["output"],
            num_train_epochs=2,
            per_device_train_batch_size=4,
            save_strategy="steps" if config["ray"] else "no",
            save_steps=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        ),
        train_dataset=Words(),
        callbacks=[KillAt(config)],
    )
    trainer.disturb_saves = config["disturb_saves"]
    trainer.notes = Path(config["notes"], f"{rank}-{everstep.get_context().get_attempt()}")
    if not config["ray"]:
        adapter.train(trainer, every_steps=config["every_steps"])
        return
    trainer.add_callback(adapter.RayTrainReportCallback())
    trainer = adapter.prepare_trainer(trainer)
    checkpoint = everstep.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as folder:
            trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint"))
