"""A metric over all workers, and reading it back: the run's metrics are those that rank 0 reports.

python examples/from_ray_train/metrics.py ~/runs
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import everstep as train
from everstep.torch import TorchTrainer


def train_loop(config):
    context = train.get_context()
    for epoch in range(config["epochs"]):
        loss = torch.tensor([(1.0 + context.get_world_rank()) / (1 + epoch)])
        dist.all_reduce(loss)
        mean = loss.item() / context.get_world_size()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"epoch-{epoch}-of-rank-{context.get_world_rank()}").touch()
            checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"epoch": epoch, "mean loss": mean}, checkpoint=checkpoint)


def main(storage_path):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": 3},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(name="metrics", storage_path=storage_path),
    )
    result = trainer.fit()
    history = [metrics["mean loss"] for _, metrics in result.best_checkpoints]
    return {"last": result.metrics, "history": history, "columns": "mean loss" in result.metrics_dataframe}


if __name__ == "__main__":
    print(main(os.path.abspath(sys.argv[1])))
