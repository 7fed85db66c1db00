"""A run of plain functions that dies twice on its way, and what is needed to watch it and to kill its
driver.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import everstep as train
from everstep import Result
from everstep.errors import NoRunError
from processes import wait_for

from .training import PACE_S, restore_step, save_step

WORKERS = 2
DEATHS = {1: 14, 2: 27}
"""Rank 1 kills itself in these attempts, after these steps. Every tenth is saved: so some are redone."""

SCRIPT = """
import sys
from pathlib import Path
from e2e import watched
from everstep import Deadlines, FailureConfig, RunConfig, ScalingConfig, Trainer

HERE = Path(__file__).parent
{given}
if __name__ == "__main__":
    Trainer(
        watched.steps,
        train_loop_config={{"until": str(HERE / "until")}},
        scaling_config=ScalingConfig(num_workers=watched.WORKERS),
        run_config=RunConfig(
            name="watched",
            storage_path=str(HERE / "runs"),
            failure_config=FailureConfig(max_failures=2),
            {arguments}
        ),
    ).fit()
"""


def steps(config: dict[str, Any]) -> int:
    """Count, together, until told to stop."""
    context = train.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    step = restore_step()
    while not train.collective.broadcast_from_rank_zero(Path(config["until"]).exists()):
        step += 1
        checkpoint = save_step(step) if rank == 0 and step % 10 == 0 else None
        metrics = {"step": step, "loss": 1 / step, "eval": {"acc": step / 2}, "note": "text", "ok": True}
        train.report(metrics, checkpoint)
        if rank == 1 and step == DEATHS.get(attempt):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PACE_S)
    return step


def start(folder: Path, arguments: str, given: str = "") -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(arguments=arguments, given=textwrap.dedent(given)))
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def result(folder: Path) -> Result:
    return Result.from_path(str(folder / "runs" / "watched"))


def await_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the journal has a report of a step so far on."""

    def there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        try:
            rows = result(folder).metrics_history
        except NoRunError:
            return False  # not yet
        return bool(rows) and rows[-1]["step"] >= step

    wait_for(there, f"step {step}")


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
