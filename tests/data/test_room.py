"""The room itself: what it imports, and where it takes its rank from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.data import Stream


def modules_after(statement: str) -> set[str]:
    script = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_room_imports_no_framework():
    heavy = {"numpy", "torch", "jax", "pyarrow", "pandas", "msgspec", "obstore", "everstep.worker.session"}
    assert (
        not modules_after("import everstep; everstep.data.Stream(10, global_batch=4, micro_batch=2)") & heavy
    )


def test_without_numpy_a_stream_gives_lists():
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        "from everstep.data import Stream\n"
        "stream = Stream([(x, -x) for x in range(100)], global_batch=50, micro_batch=50)\n"
        "(micro,) = next(iter(stream))\n"
        "print(micro.ids == micro.x == [-y for y in micro.y])\n"
        "print(micro.ids)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    same, ids = done.stdout.splitlines()
    (micro,) = next(iter(Stream(100, global_batch=50, micro_batch=50)))
    assert (same, json.loads(ids)) == ("True", micro.ids)


def steps_of_this_worker(config: dict[str, Any]) -> None:
    stream = Stream(30, global_batch=12, micro_batch=2)
    for step in stream:
        everstep.report({"ids": [number for micro in step for number in micro.ids]})


def test_in_a_training_function_the_rank_is_the_workers(tmp_path: Path):
    trainer = everstep.Trainer(
        steps_of_this_worker,
        train_loop_config={},
        scaling_config=everstep.ScalingConfig(num_workers=2),
        run_config=everstep.RunConfig(storage_path=str(tmp_path), name="ranks"),
    )
    history = trainer.fit().metrics_history
    expected = [
        [number for micro in step for number in micro.ids]
        for step in Stream(30, global_batch=12, micro_batch=2, rank=0, world_size=2)
    ]
    assert [row["ids"] for row in history] == expected


def test_replica_groups_are_refused_with_the_reason(tmp_path: Path):
    trainer = everstep.Trainer(
        steps_of_this_worker,
        train_loop_config={},
        scaling_config=everstep.ScalingConfig(num_workers=2, replica_group_size=1),
        run_config=everstep.RunConfig(storage_path=str(tmp_path), name="groups"),
    )
    with pytest.raises(everstep.TrainingFailedError, match="the samples dealt to that one would be lost"):
        trainer.fit()
