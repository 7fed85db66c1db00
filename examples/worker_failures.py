"""The shortest script that survives: a uniquely named run, and three recoveries."""

import os
import tempfile
import uuid

import torch

import everstep as train
import everstep.torch


def train_fn_per_worker(train_loop_config: dict):
    model = torch.nn.Linear(4, 1)
    start = 0
    # [1] Train worker restoration logic.
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as temp_checkpoint_dir:
            model.load_state_dict(torch.load(os.path.join(temp_checkpoint_dir, "model.pt")))
            start = checkpoint.get_metadata()["step"] + 1

    for step in range(start, train_loop_config["steps"]):
        loss = model(torch.ones(4)).square().sum()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        # [2] Checkpoint saving and reporting logic.
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                torch.save(model.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))
                checkpoint = train.Checkpoint.from_directory(temp_checkpoint_dir)
                checkpoint.set_metadata({"step": step})
            train.report({"loss": loss.item()}, checkpoint=checkpoint)


if __name__ == "__main__":
    trainer = everstep.torch.TorchTrainer(
        train_fn_per_worker,
        train_loop_config={"steps": 200},
        scaling_config=train.ScalingConfig(num_workers=4),
        run_config=train.RunConfig(
            # (If multi-node, configure S3 / NFS as the storage path.)
            # storage_path="s3://...",
            name=f"train_run-{uuid.uuid4().hex}",
            # [3] Enable worker-level fault tolerance to gracefully handle worker failures.
            failure_config=train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()
