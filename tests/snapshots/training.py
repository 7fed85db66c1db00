"""Training functions that save their state. In a module of their own, as a user's would be."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import everstep as train
from everstep.snapshots.tree import Flattened
from everstep.torch import State

PACE_S = 0.05


def note(config: dict[str, Any], **facts: Any) -> None:
    """A line in this rank's own file: what happened, seen from inside."""
    context = train.get_context()
    line = {"pid": os.getpid(), "at": time.monotonic(), "epoch": context.get_attempt(), **facts}
    with (Path(config["notes"]) / f"rank-{context.get_world_rank()}.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


def fingerprint(state: State) -> str:
    """Of every tensor and value in a state, bit for bit."""
    content = state.capture()
    found = hashlib.sha256(json.dumps(content.tree).encode())
    for name, tensor in sorted(content._tensors.items()):
        found.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Model(torch.nn.Module):
    """Two layers, and ballast that is trained as well."""

    def __init__(self, floats: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 1)
        self.ballast = torch.nn.Parameter(torch.zeros(floats))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(torch.relu(self.first(x))).sum() + self.ballast[:16].sum()


def steps(config: dict[str, Any]) -> int:
    """Data parallel training until it is told to stop. Each rank also keeps something of its own."""
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(Model(config.get("floats", 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    rank = train.get_context().get_world_rank()
    own = torch.full((config.get("own", 1),), rank)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, own=own, losses=[])
    step = state.restore()
    note(config, step=step, restored=True, state=fingerprint(state) if step else "")
    until = Path(config["until"])
    while True:
        stop = torch.tensor([1.0 if rank == 0 and until.exists() else 0.0])
        dist.all_reduce(stop)
        step += 1
        loss = model(torch.full((2, 4), float(step + rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        state.own += 1000
        state.losses = [*state.losses[-3:], loss.item()]
        note(config, step=step, state=fingerprint(state))
        train.report({"step": step}, state=state, step=step)
        note(config, step=step, reported=True)
        if stop.item():
            return step
        time.sleep(PACE_S)


def converts(config: dict[str, Any]) -> str:
    """Its state can't be saved any more after its last report."""
    state = State(own=torch.zeros(1))
    train.report({}, state=state, step=1)
    state.own = state.own.to(torch.complex128)
    return "done"


def divided_steps(config: dict[str, Any]) -> list[float]:
    """A tensor that is divided among the ranks, however many there are. Returns the whole of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    world = train.get_context().get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    weight = torch.nn.Parameter(distribute_tensor(torch.arange(22.0).view(11, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    holder = torch.nn.ParameterDict({"weight": weight})
    state = State(model=holder, optimizer=optimizer)
    step = state.restore()
    note(config, step=step, restored=True)
    while step < config["steps"]:
        step += 1
        (weight * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        train.report({"step": step}, state=state, step=step)
    return list(weight.full_tensor().detach().flatten().tolist())


def fsdp_steps(config: dict[str, Any]) -> None:
    """A model that FSDP2 divides among the ranks, however many there are. Until it is told to stop."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    context = train.get_context()
    model = torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.ReLU(), torch.nn.Linear(11, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (context.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = State(model=model, optimizer=optimizer)
    step = state.restore()
    note(config, step=step, restored=True, whole=whole(state) if step else "")
    until = Path(config["until"])
    while True:
        stop = torch.tensor([1.0 if context.get_world_rank() == 0 and until.exists() else 0.0])
        dist.all_reduce(stop)
        step += 1
        model(torch.full((2, 6), float(step + context.get_world_rank()))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(config, step=step, whole=whole(state))
        train.report({"step": step}, state=state, step=step)
        note(config, step=step, reported=True)
        if stop.item():
            return
        time.sleep(PACE_S)


def whole(state: State) -> str:
    """A fingerprint of what all ranks have of a state between them."""
    found = hashlib.sha256()
    for name, tensor in sorted(
        Flattened(
            {"m": state.model.state_dict(), "o": state.optimizer.state_dict()}, torch.is_tensor
        ).tensors.items()
    ):
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.encode() + full.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def mistaken(config: dict[str, Any]) -> dict[str, str]:
    """Reports states as one should not, and then one as one should. Returns what it is told about each
    mistake.
    """
    told = {}
    for mistake in config["mistakes"]:
        try:
            make_mistake({"mistake": mistake})
        except Exception as error:
            told[mistake] = str(error)
    model = torch.nn.Linear(2, 2)
    train.report({}, state=State(model=model, optimizer=torch.optim.AdamW(model.parameters())), step=3)
    return told


def make_mistake(config: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    match config["mistake"]:
        case "no state_dict":
            State(model=model, lock=open(os.devnull))  # noqa: SIM115
        case "no step":
            train.report({}, state=State(model=model))
        case "no state":
            train.report({}, state=model, step=1)  # type: ignore[arg-type]
        case "other tree":
            state = State(model=model, optimizer=optimizer)
            train.report({}, state=state, step=1)
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            train.report({}, state=state, step=2)
        case "another rank's":
            size = 2 + train.get_context().get_world_rank()
            train.report({}, state=State(tensor=torch.zeros(size)), step=1)
        case "sparse":
            train.report({}, state=State(tensor=torch.eye(2).to_sparse()), step=1)
        case "late restore":  # after the one that was reported above
            State(model=model).restore()
