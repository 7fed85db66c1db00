"""Hosts that were booted at different times: what happened when is told by one clock, the driver's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from e2e.training import elastic_steps
from everstep.control.commands import Recovered

from .cluster import IN_ANOTHER_TIME, LONE, RayCluster, Running


def time_namespaces() -> bool:
    try:
        return subprocess.run([*IN_ANOTHER_TIME, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not time_namespaces(), reason="this kernel lets nobody have a clock of their own"
)


@pytest.mark.parametrize("booted", ["earlier", "later"])
def test_a_recovery_takes_as_long_as_it_took_whenever_the_host_was_booted(
    cluster: RayCluster, tmp_path: Path, booted: str
) -> None:
    cluster.add_lone_host("slice-0")
    cluster.add_lone_host_at("slice-1", 3000.0 if booted == "earlier" else -time.monotonic() / 2)
    began = time.monotonic()
    run = Running(tmp_path, elastic_steps, 2, scaling=LONE, max_failures=1)
    epoch = run.until_training(2)
    before = time.monotonic()
    os.kill(run.pids()[1], signal.SIGKILL)
    run.until_training(2, epoch)
    run.until_steps()
    [recovered] = [r for r in run.records(Recovered) if r.cause is not None]
    assert recovered.total_s <= time.monotonic() - before
    # As exactly as two hosts can know each other's clocks, which isn't to the millisecond.
    assert began <= recovered.cause.at <= recovered.at
    run.finish()
