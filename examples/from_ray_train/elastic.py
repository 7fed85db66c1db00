"""As many workers as there is room for, between a minimum and a maximum.

python examples/from_ray_train/elastic.py ~/runs
"""

import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

import everstep as train
from everstep.torch import TorchTrainer


def train_loop(config):
    context = train.get_context()
    # Whatever the size is this time, together the workers see each sample once.
    mine = list(range(config["samples"]))[context.get_world_rank() :: context.get_world_size()]
    everything = [None] * context.get_world_size()
    dist.all_gather_object(everything, mine)
    seen = sorted(sample for part in everything for sample in part)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if context.get_world_rank() == 0:
            Path(folder, "seen").write_text(str(len(seen)))
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report({"seen": len(seen), "world size": context.get_world_size()}, checkpoint=checkpoint)


def main(storage_path):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"samples": 7},
        scaling_config=train.ScalingConfig(num_workers=(1, 2)),
        run_config=train.RunConfig(name="elastic", storage_path=storage_path),
    )
    return trainer.fit().metrics


if __name__ == "__main__":
    print(main(os.path.abspath(sys.argv[1])))
