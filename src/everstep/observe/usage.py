"""What the workers of a live run on this machine do and use, by the kernel and by their own counters."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.observe.registry import LiveWorker
from everstep.process import gpus, kernel
from everstep.process.gpus import GpuUse
from everstep.protocol.progress import Seen, page_of

_STATES = {"T": "stopped", "t": "traced", "D": "blocked in the kernel"}
"""Of a process, those that say more than that it is there."""


@dataclass(frozen=True)
class UsageSample:
    """One worker at one instant."""

    at: float
    worker: LiveWorker
    doing: str
    """Its stage, or what keeps it from having one."""
    reports: int
    collectives: int
    seconds: float
    """Of processor, with all that it has started."""
    memory: int
    """Bytes resident, with all that it has started."""
    gpu: GpuUse | None
    """Of GPUs, with all that it has started. None if it uses none that can be seen."""


@dataclass(frozen=True)
class Usage:
    """One worker between two instants."""

    worker: LiveWorker
    doing: str
    reports: int
    reports_per_s: float
    collectives_per_s: float
    processors: float
    """How many it kept busy."""
    memory: int
    gpu: GpuUse | None


def sample(workers: Sequence[LiveWorker]) -> dict[int, UsageSample]:
    """By rank. Workers on other machines, and those that are gone, are left out."""
    here = [worker for worker in workers if worker.alive]
    used = kernel.used_by([worker.pid for worker in here])
    at = time.monotonic()
    pages = {worker.pid: _seen(worker.pid) for worker in here}
    # Last: the driver may take seconds to answer, in which workers get on.
    on_gpus = gpus.used_by({pid: family.processes for pid, family in used.items()})
    found = {}
    for worker in here:
        seen = pages[worker.pid]
        family = used.get(worker.pid)
        if seen is None or family is None:
            continue
        found[worker.rank] = UsageSample(
            at,
            worker,
            _doing(worker, seen),
            seen.reports,
            seen.collectives,
            family.seconds,
            sum(map(_resident, family.processes)),
            on_gpus.get(worker.pid),
        )
    return found


def between(before: dict[int, UsageSample], now: dict[int, UsageSample]) -> list[Usage]:
    """By rank. Of one that was started in between, nothing is known yet but what it is doing."""
    found = []
    for rank in sorted(now):
        new = now[rank]
        old = before.get(rank, new)
        if old.worker.pid != new.worker.pid:
            old = new
        span = max(1e-9, new.at - old.at)
        found.append(
            Usage(
                new.worker,
                new.doing,
                new.reports,
                (new.reports - old.reports) / span,
                (new.collectives - old.collectives) / span,
                max(0.0, new.seconds - old.seconds) / span,
                new.memory,
                new.gpu,
            )
        )
    return found


def _doing(worker: LiveWorker, seen: Seen) -> str:
    stage = _STATES.get(kernel.state_of(worker.pid)) or seen.label or seen.stage.value
    return f"{stage}, {worker.note}" if worker.note else stage


def _seen(pid: int) -> Seen | None:
    page = page_of(pid)
    if page is None:
        return None
    try:
        return Seen(page)
    finally:
        page.close()


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0  # it has just ended
