"""Hangs that end in a GPU: whether they are seen, who is named, and how soon training goes on.

``python -m bench.hangs_gpu`` on a machine with one GPU, which both ranks use. Rank 1 hangs, each time in
another way, with tightened ``Deadlines``.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from everstep import Deadlines, FailureConfig, RunConfig, ScalingConfig
from everstep.control.commands import HangSeen
from everstep.journal import journal
from everstep.torch import TorchConfig, TorchTrainer

WAYS = ("kernel", "collective", "alone")
_AT, _STEPS = 30, 60


def train(config: dict[str, Any]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import torch
    import torch.distributed as dist

    import everstep as train

    context = train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    ours = dist.new_group(backend="nccl") if config["way"] == "collective" else None
    weights = torch.randn(2048, 2048, device="cuda")
    first = context.get_attempt() == 1
    for step in range(_STEPS):
        loss = (weights @ weights).square().mean()
        if first and step == _AT and config["way"] == "collective":
            if rank == 1:
                note(config)
                time.sleep(3600)
            dist.all_reduce(loss, group=ours)  # NCCL: it waits for rank 1 to connect
        if first and step == _AT and config["way"] != "collective" and rank == ranks - 1:
            note(config)
            torch.cuda._sleep(1 << 44)  # hours of cycles
        value = torch.tensor(loss.item())
        if ranks > 1:
            dist.all_reduce(value)
        train.report({"loss": value.item()})
        if not first and step == 0 and rank == 0:
            note(config)


def note(config: dict[str, Any]) -> None:
    with Path(config["notes"]).open("a") as out:
        out.write(f"{time.monotonic()}\n")


def measure(way: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        TorchTrainer(
            train,
            train_loop_config={"way": way, "notes": str(notes)},
            scaling_config=ScalingConfig(num_workers=1 if way == "alone" else 2, use_gpu=way == "alone"),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(
                name="run",
                storage_path=folder,
                failure_config=FailureConfig(max_failures=1),
                deadlines=Deadlines(hang_s=3.0, hang_look_s=0.25, hang_idle_s=6.0),
            ),
        ).fit()
        began, again = map(float, notes.read_text().split())
        (seen,) = [r for r in journal.read(Path(folder, "run")) if isinstance(r, HangSeen)]
        return f"{way}: ranks {seen.ranks}, {again - began:.1f} s until training went on: {seen.message}"


if __name__ == "__main__":
    for way in WAYS:
        print(measure(way), flush=True)
