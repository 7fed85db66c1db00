"""A sharded JAX array that grows and shrinks with the cluster: Orbax checkpoints restore at any number of
workers.

Orbax writes straight to shared storage, every process its own shards; Everstep only notes where
(``NO_UPLOAD``). Run it as it is: it trains on virtual slices of this machine, and takes one away and gives
another.
"""

import os
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import everstep as train
from everstep.jax import JaxTrainer
from everstep.testing import LocalCluster

SIZE = 64


def train_fn(config: dict):
    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
    whole = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec())
    weights = jax.jit(lambda: jnp.zeros(SIZE), out_shardings=sharding)()
    step = 0
    saver = ocp.StandardCheckpointer()
    checkpoint = train.get_checkpoint()
    if checkpoint:
        # Whoever wrote it, and however many they were: it comes back in the sharding that is asked for.
        like = {"weights": jax.ShapeDtypeStruct((SIZE,), weights.dtype, sharding=sharding), "step": 0}
        state = saver.restore(checkpoint.path, like)
        weights, step = state["weights"], int(state["step"])

    update = jax.jit(lambda w: w + 1.0, out_shardings=sharding)
    total = jax.jit(jnp.sum, out_shardings=whole)
    context = train.get_context()
    while True:
        stop = multihost_utils.broadcast_one_to_all(jnp.array(os.path.exists(config["until"])))
        if stop:
            return
        weights = update(weights)
        step += 1
        assert float(total(weights)) == SIZE * step, "no shard has missed a step"
        time.sleep(0.02)
        checkpoint = None
        # Now and then, and whenever Everstep would like one: every rank gets the same answer.
        if train.should_checkpoint() or step % 10 == 0:
            path = os.path.join(config["checkpoints"], f"epoch-{context.get_attempt()}-step-{step}")
            saver.save(path, {"weights": weights, "step": step})
            saver.wait_until_finished()
            checkpoint = train.Checkpoint(path)
        train.report(
            {"step": step, "workers": jax.process_count()},
            checkpoint=checkpoint,
            checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD,
        )


class ChangingCluster(train.UserCallback):
    """What a cluster does to a long run: one of two slices goes, another comes. Then it is told to stop."""

    def __init__(self, cluster: LocalCluster, until: str) -> None:
        self.cluster = cluster
        self.until = until
        self.sizes: list[int] = []

    def after_report(self, run_context, metrics, checkpoint) -> None:
        self.sizes.append(metrics[0]["workers"])
        if self.sizes[-20:] != [self.sizes[-1]] * 20:
            return  # let it train for a while
        match len(self.cluster.slices), self.seen():
            case 2, [4]:
                self.cluster.remove_slice("slice-1")
            case 1, [4, 2]:
                self.cluster.add_slice()
            case 2, [4, 2, 4]:
                open(self.until, "w").close()

    def seen(self) -> list[int]:
        """The sizes that the run has had, one after the other."""
        return [n for i, n in enumerate(self.sizes) if i == 0 or self.sizes[i - 1] != n]


if __name__ == "__main__":
    storage = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    until = os.path.join(tempfile.mkdtemp(), "until")
    with LocalCluster(slices=2, workers_per_host=2) as cluster:
        capacity = ChangingCluster(cluster, until)
        result = JaxTrainer(
            train_fn,
            train_loop_config={"until": until, "checkpoints": os.path.join(storage, "orbax")},
            scaling_config=train.ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=1),
            run_config=train.RunConfig(
                name="elastic",
                storage_path=storage,
                failure_config=train.FailureConfig(max_failures=-1),
                callbacks=[capacity],
            ),
            engine=cluster,
        ).fit()
    print(f"{result.metrics['step']} steps on {' → '.join(map(str, capacity.seen()))} workers")
