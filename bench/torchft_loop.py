"""torchft's loop, which is measured: the same for both sides, but for where ``train`` comes from.

Both use Everstep's ``FaultTolerantDDP``: with torchft's own, a kill inside an all-reduce ends the survivors.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

from bench.steps import StepLog
from everstep.torchft.data_parallel import FaultTolerantDDP

train: Any
if os.environ.get("EVERSTEP_BENCH_SIDE") == "ray":
    import ray.train

    train = ray.train
else:
    import everstep

    train = everstep


def train_until_told(config: dict[str, Any]) -> None:
    """A small model, one copy a worker; notes every step that is committed; ends when ``stop`` is there."""
    rank = train.get_context().get_world_rank()
    log = StepLog(config["folder"], rank)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        rank=0,
        world_size=1,
        replica_id=f"group_{rank}",
        hostname="localhost",
    )
    replicated, stepper = FaultTolerantDDP(manager, model), Optimizer(manager, optimizer)
    stop = Path(config["folder"]) / "stop"
    while not stop.exists():
        stepper.zero_grad()
        replicated(torch.randn(16, 64)).square().mean().backward()
        before = manager.current_step()
        stepper.step()
        time.sleep(config["step_s"])
        # A group that is alone has not come back yet.
        if manager.current_step() > before and manager.num_participants() > 1:
            log.made(manager.current_step())
    manager.shutdown(wait=False)
