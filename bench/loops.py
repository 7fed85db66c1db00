"""The training functions that are measured: the same for both sides, but for where ``train`` comes from.

All is imported at the top, as in most scripts.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.steps import StepLog

train: Any
if os.environ.get("EVERSTEP_BENCH_SIDE") == "ray":
    import ray.train.torch

    train = ray.train
else:
    import everstep.torch

    train = everstep


def train_until_told(config: dict[str, Any]) -> None:
    """A small model, data parallel; a checkpoint every few steps; ends when the file ``stop`` is there.

    ``step_s`` stands for work on an accelerator: what is measured isn't how processes share few cores.
    """
    rank = train.get_context().get_world_rank()
    log = StepLog(config["folder"], rank)
    model = train.torch.prepare_model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    began_at = step
    stop = Path(config["folder"]) / "stop"
    while True:
        inputs = torch.randn(16, 64)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(config["step_s"])
        told = torch.tensor([float(rank == 0 and stop.exists())])
        dist.all_reduce(told)
        step += 1
        log.made(step)
        metrics = {"loss": loss.item(), "step": step}
        if step % config["checkpoint_every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, os.path.join(folder, "state.pt"))
                train.report(
                    metrics, checkpoint=train.Checkpoint.from_directory(folder) if rank == 0 else None
                )
        elif step == began_at + 1:
            train.report(metrics)
        if told.item():
            return


def keep_state(config: dict[str, Any]) -> None:
    """A state of so many MiB at each rank, which changes in every step, and a snapshot after each."""
    rank = train.get_context().get_world_rank()
    log = StepLog(config["folder"], rank)
    state = train.torch.State(tensor=torch.zeros(int(config["mib"]) << 18))
    step = state.restore()
    stop = Path(config["folder"]) / "stop"
    while True:
        told = torch.tensor([float(rank == 0 and stop.exists())])
        dist.all_reduce(told)
        state.tensor += 1
        step += 1
        log.made(step)
        train.report({"step": step}, state=state, step=step)
        time.sleep(config["step_s"])
        if told.item():
            return


def train_one_step(config: dict[str, Any]) -> None:
    """The same model; over after its first step."""
    log = StepLog(config["folder"], train.get_context().get_world_rank())
    model = train.torch.prepare_model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    log.made(1)
