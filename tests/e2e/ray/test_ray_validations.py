"""Validations on a Ray cluster: tasks of Ray's, beside training."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import everstep as train
from e2e.test_reported_checkpoints import read, save
from everstep import Checkpoint, ReportedCheckpointStatus as Status, Trainer, ValidationConfig
from everstep.journal.history import read_history
from everstep.storage.store import open_store

from .cluster import LONE, RayCluster, Running


def report_some(config: dict[str, Any]) -> None:
    for name in config["names"]:
        limit_s = 1.0 if name == "sleeps" else None
        asked = train.ValidationTaskConfig(fn_kwargs={"scratch": config["notes"]}, timeout_s=limit_s)
        train.report({}, save(name), validation=asked)


def validate(checkpoint: Checkpoint, scratch: str) -> dict[str, Any]:
    name, died = read(checkpoint), Path(scratch) / "died"
    if name == "raises":
        raise ValueError("no such data")
    if name == "sleeps":
        time.sleep(3600)
    if name == "dies" and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"found": name}


def test_validations_are_tasks_of_rays_that_may_fail_die_and_take_too_long(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.add_lone_host("slice-0")
    options = {"num_cpus": 0, "max_retries": 0}
    trainer = partial(Trainer, validation_config=ValidationConfig(validate, ray_remote_kwargs=options))
    names = ["whole", "raises", "sleeps", "dies"]
    running = Running(tmp_path, report_some, 1, scaling=LONE, trainer=trainer, config={"names": names})
    result = running.wait()
    assert result.metrics == {"found": "dies"}
    kept = read_history(open_store(str(running.path))).in_order()
    assert [one.status for one in kept] == [
        Status.VALIDATED,
        Status.VALIDATION_FAILED,
        Status.VALIDATION_TIMEOUT,
        Status.VALIDATED,
    ]
