"""A script as torchrun starts it, and as ``everstep run`` does: neither is mentioned in it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.steps import StepLog


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--step-s", type=float, default=0.01)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = StepLog(asked.folder, rank)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    saved, stop = os.path.join(asked.folder, "state.pt"), Path(asked.folder, "stop")
    step = 0
    if os.path.exists(saved):
        state = torch.load(saved, weights_only=True)
        step = state["step"]
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    told = torch.zeros(1)
    while not told.item():
        loss = model(torch.randn(16, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(asked.step_s)
        told = torch.tensor([float(rank == 0 and stop.exists())])
        dist.all_reduce(told)
        step += 1
        log.made(step)
        if rank == 0 and step % 5 == 0:
            new = {"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(new, saved + ".new")
            os.replace(saved + ".new", saved)
    # Torch joins the group's threads when the model that uses it goes, and they may wait for the GIL then.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
