"""A loop that Accelerate prepares and saves, and that notes which samples it has seen at which step."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import everstep

from .notes import SAMPLES, is_killed_at

BATCH = 4


def train(config: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True)
    context = everstep.get_context()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # Its own generator: otherwise every loop over it draws from the one that dropout uses.
    loader = DataLoader(range(SAMPLES), batch_size=BATCH, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    if checkpoint := everstep.get_checkpoint():
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
            step = int(Path(folder, "step").read_text())
    notes = Path(config["notes"], f"{context.get_world_rank()}-{context.get_attempt()}")
    steps_of_a_pass = len(loader)
    while step < 2 * steps_of_a_pass:
        rest = accelerator.skip_first_batches(loader, step % steps_of_a_pass)
        for numbers in rest:
            x = numbers.float().unsqueeze(1) / SAMPLES
            loss = (model(x) - 3 * x).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            with notes.open("a") as file:
                file.write(f"{step} {loss.item():.10f} {' '.join(map(str, numbers.tolist()))}\n")
            step += 1
            saved = None
            if step % 2 == 0:
                folder = tempfile.mkdtemp()
                accelerator.save_state(folder)
                Path(folder, "step").write_text(str(step))
                saved = everstep.Checkpoint(folder)
            everstep.report({"step": step}, checkpoint=saved)
            if is_killed_at(config, step):
                os.kill(os.getpid(), signal.SIGKILL)
