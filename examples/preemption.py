"""A slice is about to be taken away: the workers hear of it, save once, and train on elsewhere.

Run it as it is: it trains on two of three virtual slices of this machine, and one of them gets a notice.
"""

import os
import sys
import tempfile
import threading
import time

import everstep as train
from everstep.testing import LocalCluster


def train_fn(config: dict):
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "step")) as file:
            start = int(file.read())
    context = train.get_context()
    if context.get_attempt() > 1 and context.get_world_rank() == 0:
        print(f"started again at step {start}: {context.get_restart_reason()}")

    told = False
    for step in range(start + 1, config["steps"] + 1):
        train.collective.barrier()  # stands for the collectives of a training step
        time.sleep(0.02)
        # Free while nothing is pending; with a notice, every rank gets the same answer at the same step.
        info = train.get_preemption_info()
        if info is not None and not told and context.get_world_rank() == 0:
            left = info.deadline_ms / 1000 - time.time()
            print(f"ranks {info.preempted_ranks} will lose their hosts in {left:.0f} s")
            told = True
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            # True where Everstep would like a checkpoint now, in all ranks at the same step.
            if train.should_checkpoint() and context.get_world_rank() == 0:
                with open(os.path.join(folder, "step"), "w") as file:
                    file.write(str(step))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"step": step}, checkpoint=checkpoint)


def take_away(cluster: LocalCluster, storage: str) -> None:
    while not os.path.exists(os.path.join(storage, "preempted", "logs", "attempt-0001")):
        time.sleep(0.1)
    time.sleep(1)
    cluster.preempt_slice("slice-1", grace_s=12)


if __name__ == "__main__":
    storage = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    with LocalCluster(slices=3) as cluster:
        threading.Thread(target=take_away, args=(cluster, storage), daemon=True).start()
        result = train.Trainer(
            train_fn,
            train_loop_config={"steps": 700},
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(name="preempted", storage_path=storage),  # max_failures is 0
            engine=cluster,
        ).fit()
    print(f"{result.metrics['step']} steps")
