"""The training function in this process: breakpoints work, and nothing is started.

    python examples/from_ray_train/local_mode.py ~/runs

Under ``torchrun --nproc-per-node=2`` its processes are one group.
"""

import os
import sys

import torch
from torch import nn

import everstep as train
from everstep.torch import TorchTrainer, prepare_model


def train_loop(config):
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(2, 1))
    loss = model(torch.ones(4, 2)).square().mean()
    context = train.get_context()
    train.report({"loss": round(loss.item(), 5), "rank": context.get_world_rank()})
    return {"pid": os.getpid(), "world size": context.get_world_size()}


def main(storage_path):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={},
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name="local_mode", storage_path=storage_path),
    )
    result = trainer.fit()
    return {
        "metrics": result.metrics,
        "in this process": result.return_value["pid"] == os.getpid(),
        "world size": result.return_value["world size"],
    }


if __name__ == "__main__":
    print(main(os.path.abspath(sys.argv[1])))
