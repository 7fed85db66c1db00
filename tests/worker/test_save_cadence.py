"""Saving every so many steps or seconds, at the same step on all ranks."""

from __future__ import annotations

import time
from pathlib import Path

import everstep
from everstep import RunConfig, ScalingConfig, Trainer
from everstep.worker.save_cadence import SaveCadence


def by_steps() -> list[int]:
    cadence = SaveCadence(5, None)
    return [step for step in range(13, 30) if cadence.is_due(step)]


def by_time(config: dict[str, str]) -> None:
    rank = everstep.get_context().get_world_rank()
    cadence = SaveCadence(None, 0.2)
    saved = []
    for step in range(1, 60):
        time.sleep(0.01 * (1 + rank))  # each rank has a pace and a clock of its own
        if cadence.is_due(step):
            saved.append(step)
    Path(config["folder"], str(rank)).write_text(repr(saved))


def test_by_steps_it_counts_from_where_training_began() -> None:
    assert by_steps() == [17, 22, 27]


def test_by_time_all_ranks_save_at_the_same_steps(tmp_path: Path) -> None:
    Trainer(
        by_time,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
    ).fit()
    first, *others = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert len(first) > len("[1]")
    assert others == [first, first]
