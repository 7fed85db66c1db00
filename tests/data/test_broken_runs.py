"""Real runs, broken at random instants and resumed with other numbers of workers: every sample once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data.broken import BATCH, SAMPLES, seen_in
from everstep.data import Stream
from everstep.observe.registry import live_runs
from processes import LIMIT_S, kill, ours, wait_for


class Broken:
    """A run of ``broken.py``, as often as it is started."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind

    def start(self, workers: int) -> subprocess.Popen[bytes]:
        settings = {
            "kind": self.kind,
            "workers": workers,
            "scratch": str(self.folder / "scratch"),
            "storage": str(self.folder / "runs"),
        }
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "data.broken", json.dumps(settings)],
                stdout=log,
                stderr=log,
                env=environment,
            )

    def commits(self) -> int:
        return len(list((self.folder / "runs").glob("run/checkpoint_*/.manifest.json")))

    def run(self, rng: random.Random) -> None:
        """To its end, through what comes in between."""
        driver = self.start(rng.randint(1, 3))
        for what in rng.choices(["worker", "driver", "everything"], k=rng.randint(1, 3)):
            enough = self.commits() + rng.randint(1, 8)
            wait_for(
                lambda enough=enough, driver=driver: self.commits() >= enough or driver.poll() is not None,
                "some checkpoints",
                look_s=0.003,
            )
            if driver.poll() is not None:
                break
            if what == "worker":
                live = live_runs().get("run")
                if live is not None and live.workers:
                    kill(rng.choice(live.workers).pid)
                continue
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            if what == "everything":
                for pid in ours():
                    kill(pid)
            driver = self.start(rng.randint(1, 3))
        assert driver.wait(LIMIT_S) == 0, (self.folder / "log").read_text()[-3000:]

    def seen(self) -> list[list[int]]:
        """The samples of each step, in the order of its micro-batches."""
        last = max((self.folder / "scratch").iterdir(), key=lambda attempt: int(attempt.name))
        rows = sorted((step, at, ids) for step, at, ids in seen_in(last))
        steps: list[list[int]] = [[] for _ in range(1 + rows[-1][0])]
        for step, _, ids in rows:
            steps[step] += ids
        return steps


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("schedule", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 26))])
def test_a_run_that_is_broken_at_random_sees_every_sample_once(
    tmp_path: Path, rng: random.Random, kind: str, schedule: int
) -> None:
    stream = Stream(SAMPLES, **BATCH, rank=0, world_size=1)
    broken = Broken(tmp_path, kind)
    broken.run(rng)
    assert broken.seen() == [[number for micro in step for number in micro.ids] for step in stream]
