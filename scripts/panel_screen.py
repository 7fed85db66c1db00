"""Writes ``docs/images/panel.svg``: the live panel of a real run, in the second after a worker was killed.

The run is on virtual slices of this machine. What is drawn is what a terminal of 100 columns shows.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console, Group
from rich.text import Text

import everstep as train
from everstep.observe import display as displays, live
from everstep.observe.registry import live_runs
from everstep.testing import LocalCluster

TARGET = Path(__file__).parents[1] / "docs" / "images" / "panel.svg"
WIDTH, LINES_ABOVE, STEPS = 110, 6, 400


def train_fn() -> None:
    context, step = train.get_context(), 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            step = int(Path(folder, "step").read_text())
    while step < STEPS:
        time.sleep(0.02)
        step += 1
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if step % 20 == 0 and context.get_world_rank() == 0:
                Path(folder, "step").write_text(str(step))
                saved = train.Checkpoint(folder)
            train.report({"step": step, "loss": 4.0 / step**0.5}, checkpoint=saved)


class Recorded(live.LiveDisplay):
    """Draws nothing, and takes a picture when it is told to."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), width=WIDTH, height=40, force_terminal=True))
        self.lines: list[Text] = []
        self.take = threading.Event()

    def _draw(self) -> None:
        while not self._closing.wait(0.1):
            self.lines += [live._styled(line, style, WIDTH) for line, style in self._take_in()]
            self._picture.render(self._console, time.monotonic())  # it measures rates from one to the next
            if self.take.is_set():
                self.take.clear()
                paper = Console(file=io.StringIO(), width=WIDTH, height=40, record=True, force_terminal=True)
                picture = self._picture.render(paper, time.monotonic())
                paper.print(Group(*self.lines[-LINES_ABOVE:], picture))
                TARGET.write_text(_without_fonts(paper.export_svg(title="python train.py")))


def _without_fonts(svg: str) -> str:
    """Rich's pictures fetch a font from another host. Any font of fixed width will do."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "Menlo, Consolas")


def _break(display: Recorded) -> None:
    while not (run := live_runs().get("llama")) or not run.workers:
        time.sleep(0.1)
    time.sleep(3.0)
    run = live_runs()["llama"]
    os.kill(next(worker.pid for worker in run.workers if worker.rank == 2), signal.SIGKILL)
    time.sleep(4.0)
    display.take.set()


def main() -> None:
    display = Recorded()
    live.live_display = lambda stream: display  # type: ignore[assignment]
    displays.is_terminal = lambda stream: True
    threading.Thread(target=_break, args=[display], daemon=True).start()
    with tempfile.TemporaryDirectory() as folder, LocalCluster(slices=2, hosts_per_slice=2) as cluster:
        train.Trainer(
            train_fn,
            scaling_config=train.ScalingConfig(num_workers=4),
            run_config=train.RunConfig(
                name="llama", storage_path=folder, failure_config=train.FailureConfig(max_failures=10)
            ),
            engine=cluster,
        ).fit()
    sys.stdout.write(f"wrote {TARGET}\n")


if __name__ == "__main__":
    main()
