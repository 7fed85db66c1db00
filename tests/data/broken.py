"""The script that is broken over and over: a stream's samples, noted with every checkpoint."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import everstep as train
from everstep import Checkpoint, Deadlines, FailureConfig, RunConfig, ScalingConfig
from everstep.data import Stream

SAMPLES = 997
BATCH: dict[str, Any] = {"global_batch": 12, "micro_batch": 2, "seed": 7, "epochs": 2}


def together(kind: str) -> None:
    """One collective of the framework's, so that ranks go in step and meet each other's deaths."""
    if kind == "torch":
        import torch

        torch.distributed.all_reduce(torch.ones(1))
    else:
        import numpy
        from jax.experimental import multihost_utils

        multihost_utils.process_allgather(numpy.ones(1))


def function(config: dict[str, Any]) -> None:
    context = train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    stream = Stream(SAMPLES, **BATCH)
    seen: list[list[Any]] = []
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            stream.load_state_dict(json.loads(Path(folder, "place-0.json").read_text()))
            seen = seen_in(Path(folder)) if rank == 0 else []
    for step in stream:
        for turn, micro in enumerate(step):
            if micro.ids:
                seen.append([step.number, turn * ranks + rank, micro.ids])
        together(config["kind"])
        time.sleep(0.01)
        saved = None
        if step.number % 4 == 0:
            folder = tempfile.mkdtemp()
            Path(folder, f"place-{rank}.json").write_text(json.dumps(stream.state_dict()))
            Path(folder, f"seen-{rank}.json").write_text(json.dumps(seen))
            saved = Checkpoint.from_directory(folder)
        train.report({"step": step.number}, checkpoint=saved)
    # Of its own: workers may end while there is no driver, and of others there may be more.
    own = Path(config["scratch"], str(context.get_attempt()))
    own.mkdir(parents=True, exist_ok=True)
    (own / f"seen-{rank}.json").write_text(json.dumps(seen))


def seen_in(folder: Path) -> list[list[Any]]:
    return [row for path in sorted(folder.glob("seen-*.json")) for row in json.loads(path.read_text())]


def main(settings: dict[str, Any]) -> None:
    if settings["kind"] == "torch":
        from everstep.torch import TorchTrainer as Trainer
    else:
        from everstep.jax import JaxTrainer as Trainer
    Trainer(
        function,
        train_loop_config={"kind": settings["kind"], "scratch": settings["scratch"]},
        scaling_config=ScalingConfig(num_workers=settings["workers"]),
        run_config=RunConfig(
            name="run",
            storage_path=settings["storage"],
            failure_config=FailureConfig(max_failures=-1),
            deadlines=Deadlines(backoff_first_s=0, backoff_max_s=0),
        ),
    ).fit()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
