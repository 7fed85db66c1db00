"""The same training function on a Ray cluster: run it on a node of the cluster, or with ``ray job submit``.

Each host of the cluster gets an agent; the workers are its children, as on one machine. If this script dies,
they train on, and running it again takes them over.
"""

import argparse
import os
import tempfile

import torch

import everstep as train
from everstep.torch import TorchTrainer, prepare_model


def train_fn(config: dict):
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        model.load_state_dict(state["model"])
        start = state["step"] + 1
    for step in range(start, config["steps"]):
        loss = model(torch.randn(32, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0 and (step % 20 == 0 or step == config["steps"] - 1):
                torch.save({"model": model.state_dict(), "step": step}, os.path.join(folder, "state.pt"))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"step": step, "loss": loss.item()}, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--storage_path", required=True, help="that every host sees: s3://…, gs://…, a shared folder"
    )
    parser.add_argument("--run_name", required=True)
    parser.add_argument("--min_workers", type=int, default=1)
    parser.add_argument("--max_workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    result = TorchTrainer(
        train_fn,
        train_loop_config={"steps": given.steps},
        scaling_config=train.ScalingConfig(num_workers=(given.min_workers, given.max_workers)),
        run_config=train.RunConfig(
            name=given.run_name,
            storage_path=given.storage_path,
            failure_config=train.FailureConfig(max_failures=3),
        ),
        engine="ray",
    ).fit()
    print(f"finished step {result.metrics['step']}")
