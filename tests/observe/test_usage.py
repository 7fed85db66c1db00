"""What workers use, between two samples."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping

import pytest

from everstep.observe import usage
from everstep.observe.registry import LiveWorker
from everstep.process import gpus
from everstep.process.gpus import GpuUse
from everstep.protocol.progress import Page, Progress, shared_memory


def test_what_workers_do_while_the_driver_of_gpus_is_waited_for_is_in_the_next_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = Page(shared_memory())
    progress = Progress(page)
    asked: list[float] = []

    def used_by(groups: Mapping[int, object]) -> dict[int, GpuUse]:
        asked.append(time.monotonic())
        progress.reported()
        return {pid: GpuUse(1.0, 1) for pid in groups}

    monkeypatch.setattr(gpus, "used_by", used_by)
    # A process of its own, with one worker's progress. This one may have others' open.
    with subprocess.Popen(["sleep", "infinity"], pass_fds=[page.fd]) as worker:
        try:
            found = usage.sample([LiveWorker(0, worker.pid, "host", "slice")])[0]
        finally:
            worker.kill()
            page.close()
    assert found.at <= asked[0]
    assert found.reports == 0
    assert found.gpu == GpuUse(1.0, 1)
