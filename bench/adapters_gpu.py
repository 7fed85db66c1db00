"""A model of GPT-2's size on a GPU, trained by Transformers and by Lightning, and killed five times.

``python -m bench.adapters_gpu [transformers] [lightning]`` on a machine with one GPU. A worker kills itself
in the middle of a pass, five times; then the losses of all steps, and the samples that they were made of,
are compared with those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import everstep
from everstep import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, lightning
from everstep.huggingface import transformers
from everstep.torch import TorchTrainer

GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 256, "vocab_size": 50257}
SMALL = {"n_embd": 32, "n_layer": 1, "n_head": 1, "n_positions": 16, "vocab_size": 100}
"""To try it where there is no GPU."""
SAMPLES, BATCH, PASSES, EVERY = 96, 4, 2, 8
STEPS = SAMPLES // BATCH * PASSES


class Tokens(Dataset[dict[str, Any]]):
    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        dice = torch.Generator().manual_seed(i)
        tokens = torch.randint(0, self._sizes["vocab_size"], (self._sizes["n_positions"],), generator=dice)
        return {"input_ids": tokens, "labels": tokens, "number": torch.tensor(i)}


class Notes:
    """A line for each step: when it was done, its loss, its samples."""

    def __init__(self, config: dict[str, Any]) -> None:
        attempt = everstep.get_context().get_attempt()
        self._path = Path(config["notes"], str(attempt))
        self._kill_at = dict(enumerate(config["kill_at"], 1)).get(attempt)

    def add(self, step: int, loss: float, numbers: list[int]) -> None:
        with self._path.open("a") as out:
            out.write(f"{time.monotonic()} {step} {loss!r} {' '.join(map(str, numbers))}\n")
        if step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def model_of(config: dict[str, Any]) -> Any:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**config["sizes"], bos_token_id=0, eos_token_id=0))


def with_transformers(config: dict[str, Any]) -> None:
    notes = Notes(config)

    class Noting(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: dict[str, Any], *more: Any, **named: Any) -> Any:
            numbers = inputs.pop("number").tolist()
            loss = super().training_step(model, inputs, *more, **named)
            notes.add(self.state.global_step, loss.item(), numbers)
            return loss

    trainer = Noting(
        model=model_of(config),
        args=TrainingArguments(
            output_dir=config["output"],
            num_train_epochs=PASSES,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            logging_steps=EVERY,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=Tokens(config["sizes"]),
    )
    transformers.train(trainer, every_steps=EVERY)


def with_lightning(config: dict[str, Any]) -> None:
    notes = Notes(config)

    class Model(lightning.pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gpt = model_of(config)

        def training_step(self, batch: dict[str, Any], index: int) -> Any:
            self.numbers = batch.pop("number").tolist()
            return self.gpt(**batch).loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            notes.add(self.global_step - 1, outputs["loss"].item(), self.numbers)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trainer = lightning.pl.Trainer(
        max_epochs=PASSES,
        accelerator="auto",
        devices=1,
        plugins=[lightning.RayLightningEnvironment()],
        callbacks=[lightning.ReportCallback(every_steps=EVERY)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=config["output"],
    )
    torch.manual_seed(1)
    batches = lightning.ResumableLoader(Tokens(config["sizes"]), batch_size=BATCH, shuffle=True)
    with lightning.newest_checkpoint() as path:
        trainer.fit(Model(), batches, ckpt_path=path)


FUNCTIONS = {"transformers": with_transformers, "lightning": with_lightning}


def fit(name: str, folder: Path, kill_at: list[int], small: bool) -> None:
    (folder / "notes").mkdir(parents=True)
    TorchTrainer(
        FUNCTIONS[name],
        train_loop_config={
            "notes": str(folder / "notes"),
            "output": str(folder / "output"),
            "kill_at": kill_at,
            "sizes": SMALL if small else GPT2,
        },
        scaling_config=ScalingConfig(num_workers=1, use_gpu=not small),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def attempts(folder: Path) -> list[list[list[str]]]:
    """The lines of each, in words."""
    files = sorted((folder / "notes").iterdir(), key=lambda file: int(file.name))
    return [[line.split() for line in file.read_text().splitlines()] for file in files]


def by_step(folder: Path) -> dict[int, tuple[float, list[str]]]:
    """(loss, samples). What was redone counts as it was done last."""
    return {int(step): (float(loss), rest) for each in attempts(folder) for _, step, loss, *rest in each}


def measure(name: str, small: bool, dice: random.Random) -> None:
    kill_at = sorted(dice.sample([step for step in range(EVERY + 2, STEPS - 2) if step % EVERY > 1], 5))
    with tempfile.TemporaryDirectory() as base:
        whole, killed = Path(base, "whole"), Path(base, "killed")
        fit(name, whole, [], small)
        fit(name, killed, kill_at, small)
        expected, found = by_step(whole), by_step(killed)
        samples = [number for _, numbers in found.values() for number in numbers]
        each_once = sorted(samples) == sorted([str(n) for n in range(SAMPLES)] * PASSES)
        apart = max(abs(found[step][0] - expected[step][0]) for step in expected)
        tried = attempts(killed)
        gaps = [float(after[0][0]) - float(before[-1][0]) for before, after in pairwise(tried)]
        again = [int(before[-1][1]) + 1 - int(after[0][1]) for before, after in pairwise(tried)]
    same = [numbers for _, numbers in found.values()] == [numbers for _, numbers in expected.values()]
    print(
        f"{name}: killed at steps {kill_at} of {STEPS}; steps done again {again}; each sample once in each "
        f"pass: {each_once}; the same samples at each step: {same}; losses apart by {apart:g} at most; kill "
        f"to the next step {statistics.median(gaps):.2f} s (median, {min(gaps):.2f} .. {max(gaps):.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters_gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FUNCTIONS)}; by default all")
    parser.add_argument("--small", action="store_true", help="a small model on the CPU, to try this")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in given.names or FUNCTIONS:
        measure(name, given.small, random.Random(given.seed))


if __name__ == "__main__":
    main()
