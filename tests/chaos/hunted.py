"""The script that the crash hunt runs: it saves sharded checkpoints until somebody kills something."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import everstep
from everstep import (
    Checkpoint,
    CheckpointUploadMode,
    Deadlines,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    Trainer,
)


def train(config: dict[str, Any]) -> None:
    rank = everstep.get_context().get_world_rank()
    step = 0
    checkpoint = everstep.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            shards = sorted(path.name for path in Path(folder).glob("shard-*"))
            assert shards == ["shard-0", "shard-1"], shards
            step = int((Path(folder) / f"shard-{rank}").read_bytes()[:12])
    uploading = Path(config["scratch"]) / f"uploading-{rank}"
    while True:
        step += 1
        folder = tempfile.mkdtemp(dir=config["scratch"])
        (Path(folder) / f"shard-{rank}").write_bytes(b"%012d" % step + os.urandom(200_000))
        uploading.write_text(str(os.getpid()))
        everstep.report(
            {"step": step},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if step % 2 else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=True,
        )
        uploading.unlink()
        time.sleep(0.5)  # every look at the run reads all of its journal


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    Trainer(
        train,
        train_loop_config={"scratch": settings["scratch"]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=settings["name"],
            storage_path=settings["storage_path"],
            storage_options=settings["storage_options"],
            failure_config=FailureConfig(max_failures=-1),
            deadlines=Deadlines(backoff_first_s=0, backoff_max_s=0),
        ),
    ).fit()
