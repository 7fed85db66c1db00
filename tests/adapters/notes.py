"""Runs of the libraries, and what their training functions note: ``notes/RANK-ATTEMPT``, a line a step."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from everstep import FailureConfig, Result, RunConfig, ScalingConfig, get_context
from everstep.torch import TorchTrainer

SAMPLES = 48
LIGHTNING_PACKAGE = "EVERSTEP_TEST_LIGHTNING_PACKAGE"
"""The environment variable that names the one of Lightning's two packages to train with."""

Row = tuple[str, tuple[int, ...]]
"""The loss, and the numbers of the samples."""


def trained_on(folder: Path) -> dict[tuple[int, int], Row]:
    """By rank and step. What was redone counts as it was done last."""
    rows = {}
    for file in sorted((folder / "notes").iterdir(), key=lambda file: file.name.split("-")[1]):
        rank = int(file.name.split("-")[0])
        for line in file.read_text().splitlines():
            step, loss, *numbers = line.split()
            rows[rank, int(step)] = (loss, tuple(map(int, numbers)))
    return rows


def first_step(folder: Path, attempt: int) -> int:
    """Of rank 0 in this attempt."""
    return int((folder / "notes" / f"0-{attempt}").read_text().split()[0])


def is_killed_at(config: dict[str, Any], step: int) -> bool:
    """Whether this worker, the last one, is killed at this step of this attempt."""
    context = get_context()
    kill_at = config["kill_at"][context.get_attempt() - 1 :][:1]
    return context.get_world_rank() == context.get_world_size() - 1 and [*kill_at] == [step]


def disturbance(step: int) -> Literal["killed", "disk full"] | None:
    """What happens in the middle of this step's save: the first attempt and the next have one each."""
    attempt = get_context().get_attempt()
    return {(1, 4): "killed", (2, 6): "disk full"}.get((attempt, step))  # type: ignore[return-value]


def disturb_save(step: int) -> None:
    match disturbance(step):
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "disk full":
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))


def fit(
    train: Callable[[dict[str, Any]], None],
    folder: Path,
    *,
    workers: int = 2,
    kill_at: tuple[int, ...] = (),
    ray: bool = False,
    disturb_saves: bool = False,
    every_steps: int = 2,
) -> Result:
    """``ray``: with Ray Train's names. ``kill_at``: the steps at which a worker is killed, one an attempt."""
    (folder / "notes").mkdir(parents=True)
    return TorchTrainer(
        train,
        train_loop_config={
            "output": str(folder / "output"),
            "notes": str(folder / "notes"),
            "kill_at": kill_at,
            "ray": ray,
            "disturb_saves": disturb_saves,
            "every_steps": every_steps,
        },
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
