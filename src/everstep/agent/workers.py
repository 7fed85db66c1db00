"""The workers of a host: started, watched and ended here. Each has a line for messages and a pipe for output.

Used from the agent's main thread only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from everstep import kernel
from everstep.agent import scratch
from everstep.agent.drivers import Connection, Holder
from everstep.agent.logs import WorkerLog
from everstep.agent.memory import PACKETS, Memory, MemoryLine
from everstep.agent.output import WorkerOutput, output_pipe
from everstep.agent.preparation import Preparation
from everstep.agent.spawner import TemplateProcess
from everstep.agent.uploads import finish_uploads, write_snapshot
from everstep.agent.watch import Watched
from everstep.agent.worker_line import WorkerLine
from everstep.protocol import framing, template_words, wire, words
from everstep.protocol.progress import Page, shared_memory
from everstep.snapshots.segments import Slot
from everstep.storage.checkpoints import Share

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
    """What we uploaded for it, and a later driver may have to be told."""
    exited: wire.Exited | None = None
    kill: int = 0
    """A signal that it is to get as soon as it has a pid."""
    by_us: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.spec.epoch, self.spec.member.rank)

    def held(self) -> wire.Held:
        return wire.Held(self.spec, self.pid, self.line.spool.acknowledged, self.line.state, bool(self.kill))


class HostWorkers:
    """``ended`` is called with each worker that is gone, after all that it said has been passed on."""

    def __init__(self, folder: Path, holder: Holder, ended: Callable[[WorkerProcess], None]) -> None:
        self._folder = folder
        self._holder = holder
        self._tell_ended = ended
        self._loop = asyncio.get_running_loop()
        self._live: dict[tuple[int, int], WorkerProcess] = {}
        self._ended: dict[tuple[int, int], WorkerProcess] = {}
        """Of the present epoch: a later driver must hear how they ended."""
        self.memory = Memory()
        self._fresh: list[TemplateProcess] = []
        """Processes that become one worker each, where forking isn't safe."""

    def __len__(self) -> int:
        return len(self._live)

    def get(self, epoch: int, rank: int) -> WorkerProcess | None:
        return self._live.get((epoch, rank))

    def running(self) -> list[WorkerProcess]:
        """Those that have a process."""
        return [worker for worker in self._live.values() if worker.pid]

    def say(self, message: wire.Quiet | wire.Examined) -> None:
        self._holder.say(message)

    def pids(self) -> set[int]:
        """Of workers, and of processes that are about to become one."""
        return {w.pid for w in self._live.values() if w.pid} | {template.pid for template in self._fresh}

    # ------------------------------------------------------------------ starting

    def start(self, specs: list[wire.WorkerSpec], preparation: Preparation, lighthouse: str) -> None:
        if any(spec.epoch > epoch for spec in specs for epoch, _ in self._ended):
            self.forget_ended()
            self.memory.retain({spec.member.rank for spec in specs})
        for spec in specs:
            template = preparation.template_for_worker()
            fresh = template is not preparation.template
            try:
                self._start(spec, template, lighthouse)
            except OSError:
                if fresh:
                    template.kill()
                raise
            if fresh:
                self._fresh.append(template)

    def _start(self, spec: wire.WorkerSpec, template: TemplateProcess, lighthouse: str) -> None:
        before = self._ended.pop((spec.epoch, spec.member.rank), None)
        if before is not None:  # of an earlier generation of its group, which nobody takes over any more
            before.line.forget()
        attempt = f"{spec.epoch}.{spec.generation}.{spec.member.rank}"
        place = scratch.make(self._folder, attempt, template.recipe.env)
        spec = msgspec.structs.replace(
            spec, spool=str(self._folder / "spool" / attempt), scratch=str(place), lighthouse=lighthouse
        )
        with ExitStack() as undo:
            undo.callback(scratch.remove, self._folder, place)
            log = WorkerLog(spec.log_path)
            undo.callback(log.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(ours.close)
            undo.callback(theirs.close)
            holds, asks = socket.socketpair(socket.AF_UNIX, PACKETS)
            undo.callback(holds.close)
            undo.callback(asks.close)
            out, into = output_pipe()
            undo.callback(os.close, out)
            undo.callback(os.close, into)
            progress = shared_memory()
            undo.pop_all()
        line = WorkerLine(spec, ours, self._holder, lambda: self._deaf(worker))
        output = WorkerOutput(spec, out, log, self._holder)
        memory = MemoryLine(
            spec.member.rank, holds, self.memory, spec.memory_fraction, partial(self._store, spec)
        )
        watched = Watched(Page(progress))
        worker = WorkerProcess(spec, template, line, output, memory, watched, kernel.oom_kills())
        self._live[worker.key] = worker
        template.fork(spec, theirs.detach(), asks.detach(), into, os.dup(progress))

    def _store(self, spec: wire.WorkerSpec, number: int, share: Share, held: bool) -> None:
        """Write a snapshot of this worker to storage, beside all else."""
        slot = self.memory.read(spec.member.rank, number)
        assert slot is not None, "a worker stores slots that it has"

        def write() -> None:
            word = write_snapshot(spec, slot, share, held)
            self._loop.call_soon_threadsafe(self._stored, spec, number, slot, word)

        threading.Thread(target=write, name="everstep-store", daemon=True).start()

    def _stored(self, spec: wire.WorkerSpec, number: int, slot: Slot, word: wire.Uploaded) -> None:
        rank = spec.member.rank
        self.memory.release(rank, slot)
        for worker in self._live.values():  # the one that asked, or the one that has its place now
            if worker.spec.member.rank == rank:
                worker.memory.stored(number)
        key = (spec.epoch, rank)
        asked = self._live.get(key) or self._ended.get(key)
        if asked is not None and asked.spec.generation == spec.generation:
            self._has_uploaded(asked, word)

    def template_said(self, word: template_words.AnyWord) -> None:
        match word:
            case template_words.Forked():
                self._forked(word)
            case template_words.Ended():
                worker = next((w for w in self._live.values() if w.pid == word.pid), None)
                if worker is not None:
                    worker.by_us = word.by_us
                    self._end(worker, word.status, word.peak_rss)
            case template_words.Loaded() | template_words.LoadFailed():
                raise AssertionError("what a template has loaded is the preparation's business")

    def _forked(self, word: template_words.Forked) -> None:
        worker = self._live.get((word.epoch, word.rank))
        if worker is None:
            return
        worker.pid = word.pid
        self._holder.say(wire.Spawned(word.epoch, worker.spec.generation, word.rank, word.pid))
        if worker.kill:
            self.signal(worker, worker.kill)

    # ------------------------------------------------------------------ talking

    def tell(self, epoch: int, ranks: list[int], body: bytes) -> None:
        for rank in ranks:
            worker = self._live.get((epoch, rank))
            if worker is not None:
                worker.line.tell(body)

    def tell_all(self, message: words.Undriven) -> None:
        body = framing.frame(message)
        for worker in list(self._live.values()):
            worker.line.tell(body)

    def acknowledged(self, message: wire.Acknowledge) -> None:
        for generation, rank, offset, state in message.ranks:
            key = (message.epoch, rank)
            worker = self._live.get(key) or self._ended.get(key)
            if worker is not None and worker.spec.generation == generation:
                worker.line.acknowledge(offset, state)

    def adjust(self) -> None:
        """The driver has begun, or ceased, to keep up."""
        for worker in self._live.values():
            worker.line.adjust()
            if self._holder.keeps_up:
                worker.output.catch_up()

    def hand_over(self, connection: Connection, lighthouse: str) -> None:
        """Tell a later driver what is here, and again all that nobody has dealt with."""
        everybody = [*self._ended.values(), *self._live.values()]
        held = [worker.held() for worker in everybody]
        connection.send(wire.Inventory(held, lighthouse, self.memory.copies()))
        for worker in everybody:
            worker.line.tell_again(connection)
            for uploaded in worker.uploaded:
                connection.send(uploaded)
            if worker.exited is not None:
                connection.send(worker.exited)
        connection.send(wire.HandedOver())

    # ------------------------------------------------------------------ ending

    def signal(self, worker: WorkerProcess, sig: int) -> None:
        worker.kill = sig
        if not worker.pid:
            return
        if worker.template in self._fresh:
            worker.by_us = True
            kernel.send_signal(worker.pid, sig)
        else:
            worker.template.end(worker.pid, sig)

    def kill_all(self) -> None:
        for worker in list(self._live.values()):
            self.signal(worker, signal.SIGKILL)

    def _deaf(self, worker: WorkerProcess) -> None:
        """It has left more unread than can be kept for it: without what it should have read it can't go on.
        Its death is a failure like any other, and its log says why.
        """
        worker.output.log.write(
            b"everstep: killed: it has not read its messages for so long that no more can be kept for it; it "
            b"was stopped, or starved\n"
        )
        if worker.pid:
            kernel.send_signal(worker.pid, signal.SIGKILL)
        else:
            worker.kill = signal.SIGKILL

    def reaped(self, pid: int, status: int, peak_rss: int) -> None:
        """A child of ours has ended: a fresh worker, or an orphan that became ours."""
        fresh = next((template for template in self._fresh if template.pid == pid), None)
        if fresh is not None:
            self._fresh.remove(fresh)
            fresh.drain()
            fresh.close()
        workers = list(self._live.values())
        worker = next((w for w in workers if w.pid == pid or w.template is fresh is not None), None)
        if worker is not None:
            self._end(worker, status, peak_rss)

    def template_died(self, template: TemplateProcess, status: int) -> None:
        """Those that it had not forked yet will never be. The others it takes along."""
        for worker in [w for w in self._live.values() if w.template is template and not w.pid]:
            self._end(worker, status, 0)

    def _end(self, worker: WorkerProcess, status: int, peak_rss: int) -> None:
        """The process is gone. All that it sent is told before that."""
        del self._live[worker.key]
        worker.line.end()
        worker.memory.close()
        worker.output.close()
        worker.watched.page.close()
        worker.exited = _exited(worker, status, peak_rss)
        self._ended[worker.key] = worker
        self._holder.say(worker.exited)
        # What it started (data loaders, helpers) goes with it; nobody waits for that.
        self._loop.call_soon(kernel.kill_sessions, {worker.pid})
        threading.Thread(target=self._clear_away, args=(worker,), daemon=True).start()
        self._tell_ended(worker)

    def _clear_away(self, worker: WorkerProcess) -> None:
        """What it was uploading is uploaded by us, beside all else; then its temporary files go."""
        for word in finish_uploads(worker.spec) if Path(worker.spec.spool).is_dir() else ():
            self._loop.call_soon_threadsafe(self._has_uploaded, worker, word)
        scratch.remove(self._folder, Path(worker.spec.scratch))

    def _has_uploaded(self, worker: WorkerProcess, word: wire.Uploaded) -> None:
        worker.uploaded.append(word)
        self._holder.say(word)

    def forget_ended(self) -> None:
        for worker in self._ended.values():
            worker.line.forget()
        self._ended = {}

    def close(self) -> None:
        """The run has left this host."""
        for template in self._fresh:
            template.close()
        self._fresh = []
        self.forget_ended()
        self.memory.clear()

    def kill_everything(self) -> None:
        for template in self._fresh:
            template.kill()
        kernel.kill_sessions({worker.pid for worker in self._live.values() if worker.pid})


def _exited(worker: WorkerProcess, status: int, peak_rss: int) -> wire.Exited:
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
        worker.output.log.tail,
        spec.log_path,
    )
