"""A worker as its agent has it: the process, its line for messages, its output, its memory."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field

from everstep.agent.memory import MemoryLine
from everstep.agent.output import WorkerOutput
from everstep.agent.spawner import TemplateProcess
from everstep.agent.watch import Watched
from everstep.agent.worker_line import WorkerLine
from everstep.process import kernel
from everstep.protocol import wire

MOST_UPLOADED = 64
"""More than a worker may have that are neither committed nor given up."""


@dataclass
class WorkerProcess:
    """One worker process and its two ways out: messages and output."""

    spec: wire.WorkerSpec
    template: TemplateProcess
    line: WorkerLine
    output: WorkerOutput
    memory: MemoryLine
    watched: Watched
    oom_before: int
    pid: int = 0
    uploaded: deque[wire.Uploaded] = field(default_factory=lambda: deque(maxlen=MOST_UPLOADED))
    """What we uploaded for it: a later driver may have to learn of it."""
    exited: wire.Exited | None = None
    stop_signal: int = 0
    """The signal that it was sent, or is to be sent as soon as it has a pid; 0: it may go on."""
    by_us: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.spec.epoch, self.spec.member.rank)

    def held(self) -> wire.Held:
        return wire.Held(
            self.spec, self.pid, self.line.spool.acknowledged, self.line.state, bool(self.stop_signal)
        )


def exited(worker: WorkerProcess, status: int, peak_rss: int) -> wire.Exited:
    code = os.waitstatus_to_exitcode(status)
    spec = worker.spec
    return wire.Exited(
        spec.epoch,
        spec.generation,
        spec.member.rank,
        time.monotonic(),
        code if code >= 0 else None,
        -code if code < 0 else None,
        worker.by_us,
        code == -signal.SIGKILL and not worker.by_us and kernel.oom_kills() > worker.oom_before,
        peak_rss,
        worker.output.tail,
        spec.log_path,
    )
