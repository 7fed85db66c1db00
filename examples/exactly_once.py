"""The same training, whatever happens: the data is seen exactly once, in batches of one size.

Trained twice on this machine: undisturbed, and on virtual hosts with five kills and two changes of the number
of workers. Both have the same loss at every step, up to the order in which gradients are added up.
"""

import os
import signal
import sys
import tempfile
import time

import torch

import everstep as train
from everstep.data import Stream
from everstep.testing import LocalCluster
from everstep.torch import TorchTrainer, prepare_model

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 1200, 40, 4, 4
HOST_GONE, HOST_BACK = 33, 55  # steps


class Waves(torch.utils.data.Dataset):
    """Points on a curve, which a small network can learn."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.tensor([index / SAMPLES], dtype=torch.float64)
        return x, torch.sin(3 * x)


def train_fn():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    model = prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    stream = Stream(Waves(), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=0, epochs=EPOCHS)
    parts = {"model": net, "optimizer": optimizer, "data": stream}  # the place is a part of the state

    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "state.pt"))
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for step in stream:  # 40 samples over all ranks, whatever their number
        total = torch.zeros((), dtype=torch.float64)
        for micro in step:  # this rank's share of them
            with step.accumulate(model, micro):
                loss = torch.nn.functional.mse_loss(model(micro.x), micro.y) * micro.scale
                loss.backward()
            total += loss.detach() / world_size
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total)
        # Once a host is given back, two workers are slow, so that the third joins before the end.
        time.sleep(0.02 if world_size == 3 or step.number < HOST_BACK else 0.5)

        row = {"step": step.number, "loss": total.item(), "workers": world_size, "pid": os.getpid()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0 and (step.number % 10 == 9 or train.should_checkpoint()):
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(row, checkpoint=checkpoint)


class Trouble(train.UserCallback):
    """Kills rank 0 five times, takes a host away for good, and later gives one back."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.kills = [12, 27, 44, 78, 101]
        self.sizes: list[int] = []

    def after_report(self, run_context, metrics, checkpoint) -> None:
        row = metrics[0]
        if not self.sizes or self.sizes[-1] != row["workers"]:
            self.sizes.append(row["workers"])
        if self.kills and row["step"] >= self.kills[0]:
            self.kills.pop(0)
            os.kill(row["pid"], signal.SIGKILL)
        elif row["step"] >= HOST_GONE and self.sizes == [3] and len(self.cluster.slices) == 3:
            self.cluster.remove_slice(list(self.cluster.slices)[-1])
        elif row["step"] >= HOST_BACK and self.sizes == [3, 2] and len(self.cluster.slices) == 2:
            self.cluster.add_slice()


def fit(name: str, storage: str, workers, callbacks=(), engine="local") -> dict[int, float]:
    """The loss at each step."""
    result = TorchTrainer(
        train_fn,
        scaling_config=train.ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1),
        run_config=train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=train.FailureConfig(max_failures=-1),
            callbacks=list(callbacks),
        ),
        engine=engine,
    ).fit()
    return {row["step"]: row["loss"] for row in result.metrics_history}


if __name__ == "__main__":
    storage = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    undisturbed = fit("undisturbed", storage, 3)
    with LocalCluster(slices=3) as cluster:
        trouble = Trouble(cluster)
        disturbed = fit("disturbed", storage, (2, 3), [trouble], cluster)
    assert list(undisturbed) == sorted(disturbed) == list(range(SAMPLES * EPOCHS // GLOBAL_BATCH))
    furthest = max(abs(undisturbed[step] - loss) for step, loss in disturbed.items())
    killed, sizes = 5 - len(trouble.kills), " → ".join(map(str, trouble.sizes))
    print(f"{len(disturbed)} steps, {killed} kills, {sizes} workers")
    last = max(undisturbed)
    print(f"loss at the end: {undisturbed[last]:.6f}, disturbed {disturbed[last]:.6f}")
    print(f"the curves differ by {furthest:.1e} at most: {'the same' if furthest < 1e-9 else 'NOT the same'}")
