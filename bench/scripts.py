"""The same script under ``everstep run`` and under torchrun: from the kill of a rank to the first new step of
all ranks. It saves and loads its own state, and no side knows of it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.sides import BenchError
from bench.steps import all_first_steps, attempts_since, newest_of_each_rank

TITLE = "an unchanged script: SIGKILL of a random rank to the first new step of all ranks"
ROUNDS, PEER_ROUNDS = 20, 5

_SCRIPT = str(Path(__file__).with_name("ddp_script.py"))
_WAIT_S = 180.0
"""A side that takes longer has not recovered."""
_QUIET_S = (0.5, 1.5)


def measure(options: Options) -> Outcome:
    ours = [sys.executable, "-m", "everstep.cli.main", "run", "--max-restarts", "-1", "--show-ranks", "0"]
    theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"]
    row = Row(
        f"kill to first step of {options.workers} ranks",
        "s",
        _killed_again_and_again("Everstep", ours, options.rounds, options),
        _killed_again_and_again("torchrun", theirs, options.peer_rounds, options)
        if options.peer_rounds
        else None,
        against="torchrun",
    )
    return Outcome("scripts", TITLE, (row,), ("both start all ranks again; the script saves every 5 steps",))


def _killed_again_and_again(name: str, command: list[str], rounds: int, options: Options) -> Sample:
    dice = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp())
    (folder / "home").mkdir()
    environment = {**os.environ, "HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--nproc-per-node", str(options.workers), _SCRIPT, "--folder", str(folder)],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    times: list[float] = []
    since = 0.0
    try:
        for at in range(rounds + 1):
            firsts = _all_stepped(folder, since, options.workers, process)
            if since:
                times.append(max(when for when, _ in firsts.values()) - since)
                options.say(f"scripts: {name}: {at} of {rounds}: {times[-1]:.3f} s")
            if at == rounds:
                break
            time.sleep(dice.uniform(*_QUIET_S))
            group = newest_of_each_rank(attempts_since(folder, since))
            since = time.monotonic()
            os.kill(dice.choice([attempt.pid for _, attempt in sorted(group.items())]), signal.SIGKILL)
        (folder / "stop").touch()
        _ended(process, folder, name)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return Sample(tuple(times))


def _ended(process: subprocess.Popen[bytes], folder: Path, name: str) -> None:
    try:
        code = process.wait(_WAIT_S)
    except subprocess.TimeoutExpired:
        code = -1
    if code != 0:
        raise BenchError(f"{name} ended with {code}: {(folder / 'log').read_text()[-2000:]}")


def _all_stepped(
    folder: Path, since: float, workers: int, process: subprocess.Popen[bytes]
) -> dict[int, tuple[float, int]]:
    deadline = time.monotonic() + _WAIT_S
    while True:
        found = all_first_steps(attempts_since(folder, since), workers)
        if found is not None:
            return found
        if process.poll() is not None or time.monotonic() > deadline:
            how = f"ended with {process.returncode}" if process.returncode is not None else "did not go on"
            raise BenchError(f"it {how}: {(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.02)
