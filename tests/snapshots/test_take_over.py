"""Snapshots outlive the driver: one that takes its workers over restores from them, too."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from everstep.observe.registry import live_runs
from processes import LIMIT_S, wait_for

from .runs import World

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

SCRIPT = """
import sys
from pathlib import Path
from everstep import CheckpointConfig, FailureConfig, MemoryConfig, RunConfig, ScalingConfig
from everstep.torch import TorchTrainer
from snapshots.training import steps

HERE = Path(__file__).parent
TorchTrainer(
    steps,
    train_loop_config={"notes": str(HERE / "notes"), "until": str(HERE / "until")},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name=sys.argv[1],
        storage_path=str(HERE / "runs"),
        failure_config=FailureConfig(max_failures=-1),
        checkpoint_config=CheckpointConfig(storage_every_s=3600, memory=MemoryConfig(every_s=0)),
    ),
).fit()
"""


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_later_driver_restores_what_workers_of_an_earlier_one_had(tmp_path: Path) -> None:
    world = World(tmp_path)
    name = f"memory-{random.getrandbits(32):08x}"
    process = start(tmp_path, name)
    world.wait_for_step(1, 5)
    process.kill()
    process.communicate()
    alone = world.newest_step(1)
    world.wait_for_step(1, alone + 3)  # without a driver they train on
    process = start(tmp_path, name)
    wait_for(lambda: name in live_runs() and live_runs()[name].driver_pid == process.pid, "a take-over")
    driven = world.newest_step(1)
    world.wait_for_step(1, driven + 3)
    os.kill(world.of_epoch(1)[1][-1]["pid"], signal.SIGKILL)
    world.wait_for_step(2, 1)
    assert world.check_restored(2) > driven
    world.until.touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "state from memory" in output
