"""Uploads behind training's back: ``report`` returns before the checkpoint is in storage.

python examples/from_ray_train/asynchronous.py ~/runs
"""

import os
import sys
import tempfile
from pathlib import Path

import everstep as train
from everstep.torch import TorchTrainer


def train_loop(config):
    rank = train.get_context().get_world_rank()
    for step in range(1, config["steps"] + 1):
        folder = tempfile.mkdtemp()  # removed once it is uploaded
        Path(folder, f"rank-{rank}").write_text(str(step))
        train.report(
            {"step": step},
            checkpoint=train.Checkpoint.from_directory(folder),
            checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
        )


def main(storage_path):
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"steps": 4},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(name="asynchronous", storage_path=storage_path),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        parts = {path.name: path.read_text() for path in Path(folder).glob("rank-*")}
    return {"metrics": result.metrics, "kept": len(result.best_checkpoints), "parts": parts}


if __name__ == "__main__":
    print(main(os.path.abspath(sys.argv[1])))
