"""The script that the attacks on storage run: it saves a checkpoint at every step."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import everstep
from everstep import Checkpoint, CheckpointConfig, Deadlines, FailureConfig, RunConfig, ScalingConfig, Trainer
from everstep.engine.local.own_host import OwnHost
from everstep.journal.lease import take

STEP_S = 0.1
"""Between checkpoints: writing one takes several processes, and S3 one of its own."""


def train(config: dict[str, Any]) -> int:
    rank = everstep.get_context().get_world_rank()
    step = 0
    checkpoint = everstep.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            step = int((Path(folder) / "step-0").read_text())
    with Path(config["scratch"], "restored").open("a") as out:
        out.write(f"{rank} {step}\n")
    enough = Path(config["scratch"], "enough")
    # Rank 0 says when to end: a rank that looked a moment later would leave the others waiting for it.
    while step < config["steps"] and not everstep.collective.broadcast_from_rank_zero(enough.exists()):
        step += 1
        time.sleep(config["step_s"])
        checkpoint = None
        if rank in config["savers"]:
            folder = tempfile.mkdtemp()
            (Path(folder) / f"step-{rank}").write_text(str(step))
            (Path(folder) / f"payload-{rank}").write_bytes(bytes(config["payload"]))
            checkpoint = Checkpoint.from_directory(folder)
        # A score that jumps about: what retention keeps isn't simply the newest.
        everstep.report({"step": step, "score": step * 7919 % 101}, checkpoint=checkpoint)
    return step


def sleep_before_the_host_starts() -> None:
    """The process is stopped at that very moment, once it has the run."""
    start = OwnHost.start

    async def stopped_start(host: OwnHost) -> None:
        OwnHost.start = start  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
        await start(host)

    OwnHost.start = stopped_start  # type: ignore[method-assign]


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    if settings.get("sleeps_before_its_host"):
        sleep_before_the_host_starts()
    # Compactions in every run, also in a short one.
    take.__kwdefaults__["compact_after"] = settings.get("compact_after", 5)
    result = Trainer(
        train,
        train_loop_config={
            "scratch": settings["scratch"],
            "savers": settings.get("savers", [0, 1]),
            "steps": settings.get("steps", 1_000_000),
            "step_s": settings.get("step_s", STEP_S),
            "payload": settings.get("payload", 0),
        },
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=settings["name"],
            storage_path=settings["storage_path"],
            storage_options=settings.get("storage_options"),
            failure_config=FailureConfig(max_failures=settings.get("max_failures", -1)),
            checkpoint_config=CheckpointConfig(
                num_to_keep=settings.get("keep"),
                checkpoint_score_attribute="score" if settings.get("keep") else None,
            ),
            deadlines=Deadlines(backoff_first_s=0, backoff_max_s=0, **settings.get("deadlines", {})),
            lease_ttl_s=settings.get("ttl_s", 15.0),
        ),
    ).fit()
    print("unsaved", *result.unsaved_reports)
