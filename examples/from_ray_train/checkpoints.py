"""Saving and restoring: a model that is saved after every epoch, of which the two best are kept.

python examples/from_ray_train/checkpoints.py ~/runs
"""

import os
import sys
import tempfile

import torch
from torch import nn

import everstep as train
from everstep.torch import TorchTrainer, prepare_model


def train_loop(config):
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    inputs = torch.arange(32.0).reshape(8, 4) / 32
    targets = inputs.sum(dim=1, keepdim=True)
    for epoch in range(config["epochs"]):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                torch.save({"model": model.state_dict(), "epoch": epoch}, os.path.join(folder, "state.pt"))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)


def main(storage_path):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"lr": 0.1, "epochs": 5},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="checkpoints",
            storage_path=storage_path,
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
        ),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        state = torch.load(os.path.join(folder, "state.pt"))
    best = result.get_best_checkpoint("loss", "min")
    with best.as_directory() as folder:
        best_epoch = torch.load(os.path.join(folder, "state.pt"))["epoch"]
    return {
        "loss": round(result.metrics["loss"], 5),
        "kept": len(result.best_checkpoints),
        "newest epoch": state["epoch"],
        "best epoch": best_epoch,
        "parameters": sorted(state["model"]),
    }


if __name__ == "__main__":
    print(main(os.path.abspath(sys.argv[1])))
