"""Running a user's script as a user does: a file, a process, signals from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

SLOW = """
import multiprocessing, os, subprocess, sys, threading, time
from pathlib import Path
import everstep
from everstep import Deadlines, RunConfig, ScalingConfig, Trainer

HERE = Path(__file__).parent

def child():
    while True:
        time.sleep(1)

def train(config):
    rank = everstep.get_context().get_world_rank()
    # What a data loader does: a forked child; and what a user's own tools do: a process in a session of its
    # own.
    multiprocessing.get_context("fork").Process(target=child, daemon=True).start()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    (HERE / f"up-{rank}").write_text(str(os.getpid()))
    try:
        while True:
            time.sleep(0.01)
            everstep.report({"t": time.time()})
    finally:
        if not config.get("stubborn"):
            (HERE / f"cleaned-{rank}").touch()
        else:
            while True:
                time.sleep(1)

def trainer(**config):
    return Trainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="slow",
            storage_path=str(HERE / "runs"),
            deadlines=Deadlines(orphan_s=config.get("orphan_s", 300)),
        ),
    )
"""


def start(
    folder: Path, body: str, env: Mapping[str, str] | None = None, **kwargs: object
) -> subprocess.Popen[str]:
    """Run ``SLOW`` followed by ``body`` as a script, with these variables besides those that there are."""
    script = folder / "script.py"
    script.write_text(SLOW + "\n" + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
        **kwargs,  # type: ignore[call-overload]
    )
