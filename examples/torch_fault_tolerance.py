"""Fault tolerance in a PyTorch training script: the shape that every script has.

Kill any of its workers while it runs: it goes on from the newest checkpoint. Kill the script itself, run the
same command again, and it does, too:

    python examples/torch_fault_tolerance.py --storage_path ~/runs --run_name my-run
"""

import argparse
import os
import tempfile

import torch
from torch import nn

import everstep as train
import everstep.torch


def train_fn_per_worker(train_loop_config: dict):
    torch.manual_seed(0)
    model = everstep.torch.prepare_model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=train_loop_config["lr"])
    start_epoch = 0

    # [1] Train worker restoration logic.
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as temp_checkpoint_dir:
            state = torch.load(os.path.join(temp_checkpoint_dir, "state.pt"))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start_epoch = state["epoch"] + 1

    for epoch in range(start_epoch, train_loop_config["num_epochs"]):
        x = torch.randn(64, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # [2] Checkpoint saving and reporting logic.
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(temp_checkpoint_dir, "state.pt"))
                checkpoint = train.Checkpoint.from_directory(temp_checkpoint_dir)
            train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path", type=str, required=True)
    parser.add_argument("--run_name", type=str, required=True)
    parser.add_argument("--num_epochs", type=int, default=50)
    args = parser.parse_args()

    trainer = everstep.torch.TorchTrainer(
        train_fn_per_worker,
        train_loop_config={"lr": 1e-2, "num_epochs": args.num_epochs},
        scaling_config=train.ScalingConfig(num_workers=4),
        run_config=train.RunConfig(
            # [3] Enable worker-level fault tolerance to gracefully handle worker failures.
            failure_config=train.FailureConfig(max_failures=3),
            # [4] The (storage_path, name) pair is determined by whoever submits the job: the same pair
            # resumes it.
            storage_path=args.storage_path,
            name=args.run_name,
        ),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f} after {len(result.metrics_history)} epochs, in {result.path}")
