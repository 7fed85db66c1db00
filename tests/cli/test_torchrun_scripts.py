"""Five scripts of the kinds that people start with torchrun, unchanged: after kills
they end as they do under torchrun without any.

``make soak`` kills each twenty times, and compares with torchrun itself.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.observe.registry import live_runs
from processes import LIMIT_S, kill, wait_for

SCRIPTS = Path(__file__).with_name("torchrun")
EVERSTEP = (sys.executable, "-m", "everstep.cli.main", "run", "--storage-path", "runs", "--name", "script")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


class Started:
    """A script under a launcher, in a folder of its own."""

    def __init__(self, folder: Path, launcher: tuple[str, ...], script: str, steps: int) -> None:
        folder.mkdir()
        self.folder = folder
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*launcher, "--nproc-per-node=2", str(SCRIPTS / f"{script}.py")],
                cwd=folder,
                stdout=output,
                stderr=output,
                env={**os.environ, "STEPS": str(steps)},
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def newest_step(self) -> int:
        assert self.process.poll() is None, self.output
        return max(map(int, re.findall(r"step (\d+)$", self.output, re.MULTILINE)), default=0)

    def finals(self) -> set[str]:
        """What the model came to, at the ranks that say so, once all have ended well."""
        assert self.process.wait(LIMIT_S) == 0, self.output
        return set(re.findall(r"final (\S+)", self.output))

    def end(self) -> None:
        kill(self.process.pid)
        self.process.wait()


def killed(folder: Path, script: str, kills: int, rng: random.Random) -> set[str]:
    """Run it to its end through so many kills of a random rank, each after some new steps."""
    steps = 4 * kills + 6
    run = Started(folder, (*EVERSTEP, "--max-restarts=-1"), script, steps)
    try:
        killed_in = 0
        for number in range(kills):
            # Two deaths in one attempt are one incident, of which there is one recovery.
            wait_for(
                lambda n=number, before=killed_in: (
                    run.newest_step() > 4 * n + 1 and live_runs()["script"].epoch > before
                ),
                f"steps of a new attempt before kill {number + 1}",
            )
            live = live_runs()["script"]
            killed_in = live.epoch
            os.kill(rng.choice(live.workers).pid, signal.SIGKILL)
        found = run.finals()
    finally:
        run.end()
    assert run.output.count("recovering from") == kills, run.output
    return found


@pytest.mark.parametrize("script", ["accumulation", "dcp", "fsdp2"])
def test_a_script_survives_a_kill(tmp_path: Path, script: str, rng: random.Random) -> None:
    assert len(killed(tmp_path / "killed", script, 1, rng)) == 1, "ranks agree on what the model came to"


@pytest.mark.soak
@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_a_script_ends_after_twenty_kills_as_under_torchrun(
    tmp_path: Path, script: str, rng: random.Random
) -> None:
    steps = 4 * 20 + 6
    undisturbed = Started(tmp_path / "torchrun", TORCHRUN, script, steps)
    try:
        expected = undisturbed.finals()
    finally:
        undisturbed.end()
    assert len(expected) == 1, undisturbed.output
    assert killed(tmp_path / "everstep", script, 20, rng) == expected
