"""A sharded torch model that grows and shrinks with the cluster: torch's distributed checkpoints restore at
any number of workers.

Every rank writes its own shards, and all of them together form one checkpoint. Run it as it is: it trains on
virtual slices of this machine, and takes one away and gives another.
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import everstep as train
from everstep.testing import LocalCluster
from everstep.torch import TorchTrainer

SIZE = 64


def train_fn(config: dict):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"weights": distribute_tensor(torch.zeros(SIZE), mesh, [Shard(0)]), "step": torch.tensor(0)}
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)  # whoever wrote it, and however many they were

    while True:
        # All ranks see the same step, so all of them stop at the same one.
        stop = torch.tensor(float(os.path.exists(config["until"])))
        dist.all_reduce(stop)
        if stop:
            return
        mine: DTensor = state["weights"]
        mine.to_local().add_(1.0)  # a training step: each rank updates the shard that it holds
        state["step"] += 1
        step = int(state["step"])
        assert mine.full_tensor().eq(step).all(), "no shard has missed a step"
        time.sleep(0.02)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            # Now and then, and whenever Everstep would like one: every rank gets the same answer.
            if train.should_checkpoint() or step % 10 == 0:
                dcp.save(state, checkpoint_id=folder)
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"step": step, "workers": dist.get_world_size()}, checkpoint=checkpoint)


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
        result = TorchTrainer(
            train_fn,
            train_loop_config={"until": until},
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
