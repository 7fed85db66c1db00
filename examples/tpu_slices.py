"""JAX on TPU slices of a Ray cluster: whole slices or none, as many as there are between two limits.

One worker for each TPU host. With more than one slice, the environment for their network is computed from the
workers that are really there.
"""

import argparse
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import everstep as train
from everstep.jax import JaxTrainer


def train_fn(config: dict):
    context = train.get_context()
    weights, start = np.zeros(8), 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = np.load(os.path.join(folder, "state.npz"))
            weights, start = state["weights"], int(state["step"]) + 1
    gradient = jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w - x.sum(axis=1)) ** 2)))
    for step in range(start, config["steps"]):
        batch = np.random.randn(32, 8)
        weights = weights - 0.1 * multihost_utils.process_allgather(gradient(weights, batch)).mean(axis=0)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            due = train.should_checkpoint() or step % 50 == 0 or step == config["steps"] - 1
            if due and context.get_world_rank() == 0:
                np.savez(os.path.join(folder, "state.npz"), weights=weights, step=step)
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"step": step, "slices": context.get_num_slices()}, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--storage_path", required=True, help="that every host sees: gs://bucket/runs, for example"
    )
    parser.add_argument("--topology", default="4x4")
    parser.add_argument("--accelerator_type", default="TPU-V6E")
    parser.add_argument("--chips_per_worker", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs=2, default=(4, 8), metavar=("MIN", "MAX"))
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    result = JaxTrainer(
        train_fn,
        train_loop_config={"steps": given.steps},
        scaling_config=train.ScalingConfig(
            use_tpu=True,
            topology=given.topology,
            accelerator_type=given.accelerator_type,
            num_workers=tuple(given.workers),
            resources_per_worker={"TPU": given.chips_per_worker},
        ),
        run_config=train.RunConfig(
            name="slices",
            storage_path=given.storage_path,
            failure_config=train.FailureConfig(max_failures=3),
        ),
        engine="ray",
    ).fit()
    print(f"finished step {result.metrics['step']} on {result.metrics['slices']} slices")
