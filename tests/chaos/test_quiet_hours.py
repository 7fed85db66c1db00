"""Hours in which nothing hangs: nobody is named, with the ``Deadlines`` that users have.

Evaluations, compilers, data that is late and slow uploads make ranks wait for each other, and now and then
the machine is suspended. ``EVERSTEP_QUIET_S`` is how many seconds it takes, an hour by default.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from everstep.control.commands import HangSeen, Recovered
from everstep.journal import journal
from everstep.journal.records import StragglerSeen
from processes import kill

from . import quiet

FOR_S = float(os.environ.get("EVERSTEP_QUIET_S", "3600"))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", quiet.KINDS)
def test_in_hours_without_a_hang_or_a_straggler_nobody_is_named(
    tmp_path: Path, rng: random.Random, kind: str
) -> None:
    command = [sys.executable, "-m", "chaos.quiet", kind, str(tmp_path), str(rng.randrange(1 << 30))]
    driver = subprocess.Popen(command)
    try:
        end = time.monotonic() + FOR_S
        while time.monotonic() < end:
            time.sleep(rng.uniform(120, 300))  # the machine is awake for so long
            assert driver.poll() is None, "the run has ended"
            if kind != "jax":  # its coordinator gives up processes that were suspended
                _suspend(driver.pid, rng.uniform(20, 60))
        (tmp_path / "until").touch()
        assert driver.wait(600) == 0
    finally:
        kill(driver.pid)
        driver.wait()
    records = list(journal.read(tmp_path / quiet.NAME))
    assert [r for r in records if isinstance(r, (HangSeen, StragglerSeen, Recovered))] == []


def _suspend(driver: int, seconds: float) -> None:
    """As a laptop whose lid is closed."""
    process = psutil.Process(driver)
    all_of_it = [process, *process.children(recursive=True)]
    for sig in (signal.SIGSTOP, signal.SIGCONT):
        for each in all_of_it:
            if each.is_running():
                os.kill(each.pid, sig)
        if sig == signal.SIGSTOP:
            time.sleep(seconds)
