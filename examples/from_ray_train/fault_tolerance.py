"""A worker fails once, and training goes on from the newest checkpoint.

python examples/from_ray_train/fault_tolerance.py ~/runs
"""

import os
import sys
import tempfile
from pathlib import Path

import everstep as train
from everstep.collective import barrier
from everstep.torch import TorchTrainer


def train_loop(config):
    begins = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            begins = int(Path(folder, "epoch").read_text()) + 1
    rank = train.get_context().get_world_rank()
    for epoch in range(begins, config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                Path(folder, "epoch").write_text(str(epoch))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"epoch": epoch, "began at": begins}, checkpoint=checkpoint)
        barrier()  # so that epoch 2 is safe before one of the two fails
        if epoch == 2 and begins == 0 and rank == 1:
            raise RuntimeError("a disk is full, a cosmic ray, a bug")
    return begins


def main(storage_path):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": 6},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="fault_tolerance",
            storage_path=storage_path,
            failure_config=train.FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    return {"metrics": result.metrics, "began at": result.return_value, "error": result.error}


if __name__ == "__main__":
    print(main(os.path.abspath(sys.argv[1])))
