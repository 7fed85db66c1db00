"""Writes ``docs/images/page.png``: the page of a real run, after a worker was killed, another one hung, a
third one raised, and a host was lost.

The run is on virtual slices of this machine. Needs Chromium.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import everstep as train  # noqa: E402
from bench.browser import Browser  # noqa: E402
from everstep.observe.page import static_page  # noqa: E402
from everstep.observe.registry import live_runs  # noqa: E402
from everstep.observe.view import RunView  # noqa: E402
from everstep.storage.store import open_store  # noqa: E402
from everstep.testing import LocalCluster  # noqa: E402

TARGET = ROOT / "docs" / "images" / "page.png"
STEPS = 700
WIDTH, HEIGHT = 1200, 1400


def next_batch(step: int) -> None:
    """Three ranks fail in three ways, each in another attempt."""
    match train.get_context().get_epoch(), train.get_context().get_world_rank(), step:
        case 1, 2, 190:
            os.kill(os.getpid(), signal.SIGKILL)
        case 2, 5, 330:
            time.sleep(3600)
        case 3, 1, 450:
            raise FloatingPointError("the loss is not a number")
        case _:
            time.sleep(0.03)


def train_fn() -> None:
    step = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            step = int(Path(folder, "step").read_text())
    noise = random.Random(train.get_context().get_epoch())
    while step < STEPS:
        step += 1
        next_batch(step)
        train.collective.barrier()
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if step % 100 == 0 and train.get_context().get_world_rank() == 0:
                Path(folder, "step").write_text(str(step))
                saved = train.Checkpoint(folder)
            metrics = {
                "loss": 4.0 / math.sqrt(step + 4) + noise.gauss(0, 0.02),
                "accuracy": 1 - 1 / (1 + step / 150) + noise.gauss(0, 0.01),
                "lr": 0.001 * min(1.0, step / 100) * (1 - step / STEPS),
            }
            train.report(metrics, checkpoint=saved)


def _lose_a_host(cluster: LocalCluster) -> None:
    while not (run := live_runs().get("llama")) or run.epoch < 4:
        time.sleep(0.1)
    time.sleep(4.0)
    cluster.kill_host(next(worker.host for worker in run.workers if worker.rank == 0))


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(slices=3, hosts_per_slice=2, workers_per_host=2) as cluster,
    ):
        threading.Thread(target=_lose_a_host, args=[cluster], daemon=True).start()
        train.Trainer(
            train_fn,
            scaling_config=train.ScalingConfig(num_workers=8),
            run_config=train.RunConfig(
                name="llama",
                storage_path=folder,
                failure_config=train.FailureConfig(max_failures=10),
                deadlines=train.Deadlines(hang_s=4.0, hang_look_s=1.0),
            ),
            engine=cluster,
        ).fit()
        view = RunView(open_store(f"{folder}/llama"))
        view.refresh()
        shown = view.as_plain()
        shown["address"] = "/data/runs/llama"
        page = Path(folder, "page.html")
        # It is about the run, and not about where this script lies.
        page.write_text(
            static_page(shown).replace(__file__, "train.py").replace(str(ROOT), "/home/me"), encoding="utf-8"
        )
        _draw(page, TARGET, dark=False)
        if len(sys.argv) > 1:
            _draw(page, Path(sys.argv[1]), dark=True)
    sys.stdout.write(f"wrote {TARGET}\n")


def _draw(page: Path, target: Path, *, dark: bool) -> None:
    with Browser() as browser:
        tab = browser.open(page.as_uri(), dark=dark, width=WIDTH, height=HEIGHT)
        hang = "[...document.querySelectorAll('.list .row')].find((row) => row.innerText.includes('hang'))"
        tab.run(f"({hang} || document.querySelector('.list .row')).click()")
        tab.run("document.activeElement.blur(); scrollTo(0, 0)")
        tab.run("document.querySelector('figure').scrollIntoView(); scrollTo(0, 0)")
        tab.wait_for("document.querySelector('figure svg') !== null")
        tab.frame()
        tab.picture(target)


if __name__ == "__main__":
    main()
