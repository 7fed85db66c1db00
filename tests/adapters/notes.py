"""Runs of the libraries, and what their training functions note: ``notes/RANK-ATTEMPT``, a line a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep import FailureConfig, Result, RunConfig, ScalingConfig
from everstep.torch import TorchTrainer

SAMPLES = 48

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


def fit(
    train: Callable[[dict[str, Any]], None],
    folder: Path,
    *,
    workers: int = 2,
    kill_at: int | None = None,
    ray: bool = False,
) -> Result:
    """``ray``: with Ray Train's names. ``kill_at``: the step at which a worker is killed once."""
    (folder / "notes").mkdir(parents=True)
    return TorchTrainer(
        train,
        train_loop_config={
            "output": str(folder / "output"),
            "notes": str(folder / "notes"),
            "kill_at": kill_at,
            "ray": ray,
        },
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
