"""The workers of a host: started, watched and ended here. Each has a line for messages and a pipe for output.

Used from the agent's main thread only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from everstep.agent import scratch
from everstep.agent.drivers import Connection, Holder
from everstep.agent.logs import WorkerLog
from everstep.agent.memory import PACKETS, Memory, MemoryLine
from everstep.agent.output import WorkerOutput, open_streams
from everstep.agent.peers import Peers
from everstep.agent.preparation import Preparation
from everstep.agent.spawner import TemplateProcess
from everstep.agent.uploads import HostUploads
from everstep.agent.watch import Watched
from everstep.agent.worker_line import WorkerLine
from everstep.agent.worker_process import WorkerProcess, exited
from everstep.errors import StorageAccessError
from everstep.process import kernel
from everstep.protocol import framing, template_messages, wire, worker_messages
from everstep.protocol.progress import Page, shared_memory


class HostWorkers:
    """``ended`` is called with each worker that is gone, after all its messages have been passed on."""

    def __init__(self, folder: Path, holder: Holder, ended: Callable[[WorkerProcess], None]) -> None:
        self._folder = folder
        self._holder = holder
        self._on_ended = ended
        self._loop = asyncio.get_running_loop()
        self._live: dict[tuple[int, int], WorkerProcess] = {}
        self._ended: dict[tuple[int, int], WorkerProcess] = {}
        """Of the present epoch: a later driver must learn how they ended."""
        self.memory = Memory()
        self._uploads = HostUploads(holder, self.memory, self._known)
        self.peers = Peers(folder, holder, self.memory)
        self._fresh: list[TemplateProcess] = []
        """Processes that become one worker each, where forking isn't safe."""

    def __len__(self) -> int:
        return len(self._live)

    def get(self, epoch: int, rank: int) -> WorkerProcess | None:
        return self._live.get((epoch, rank))

    def _known(self, rank: int) -> list[WorkerProcess]:
        """Of this rank: one that lives, and those of the present epoch that have ended."""
        return [w for w in (*self._live.values(), *self._ended.values()) if w.spec.member.rank == rank]

    def running(self) -> list[WorkerProcess]:
        """Those that have a process."""
        return [worker for worker in self._live.values() if worker.pid]

    def pids(self) -> set[int]:
        """Of workers, and of processes that are about to become one."""
        return {w.pid for w in self._live.values() if w.pid} | {template.pid for template in self._fresh}

    # ------------------------------------------------------------------ starting

    def start(self, specs: list[wire.WorkerSpec], preparation: Preparation, lighthouse: str) -> None:
        epochs, ranks = {spec.epoch for spec in specs}, {spec.member.rank for spec in specs}
        in_the_way = [w.pid for (e, rank), w in self._live.items() if e not in epochs or rank in ranks]
        if in_the_way:
            raise OSError(f"workers of an earlier attempt (pids {in_the_way}) are still there")
        if any(spec.epoch > epoch for spec in specs for epoch, _ in self._ended):
            self.forget_ended()
            kept = {at for spec in specs for at in spec.kept}
            self.memory.retain({spec.member.rank for spec in specs}, kept)
        for spec in specs:
            template = preparation.template_for_worker()
            fresh = template is not preparation.template
            try:
                self._start(spec, template, lighthouse)
            except (OSError, StorageAccessError):
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
            sources, output = open_streams(spec, undo)
            progress = shared_memory()
            undo.pop_all()
        line = WorkerLine(spec, ours, self._holder, lambda: self._overflowed(worker))
        page = Page(progress)
        printed = WorkerOutput(spec, sources, log, self._holder, page)
        memory = MemoryLine(
            spec.member.rank,
            holds,
            self.memory,
            spec.memory_fraction,
            partial(self._uploads.store, spec),
            self.peers,
        )
        watched = Watched(page)
        worker = WorkerProcess(spec, template, line, printed, memory, watched, kernel.oom_kills())
        self._live[worker.key] = worker
        template.fork(spec, theirs.detach(), asks.detach(), output, os.dup(progress))

    def on_template_message(self, message: template_messages.AnyMessage) -> None:
        match message:
            case template_messages.Forked():
                self._forked(message)
            case template_messages.Ended():
                worker = next((w for w in self._live.values() if w.pid == message.pid), None)
                if worker is not None:
                    worker.by_us = message.by_us
                    self._end(worker, message.status, message.peak_rss)
            case template_messages.Loaded() | template_messages.LoadFailed():
                raise AssertionError("what a template has loaded is the preparation's business")

    def _forked(self, message: template_messages.Forked) -> None:
        worker = self._live.get((message.epoch, message.rank))
        if worker is None:
            return
        worker.pid = message.pid
        self._holder.send(wire.Spawned(message.epoch, worker.spec.generation, message.rank, message.pid))
        if worker.stop_signal:
            self.signal(worker, worker.stop_signal)

    # ------------------------------------------------------------------ talking

    def send_to(self, epoch: int, ranks: list[int], body: bytes) -> None:
        for rank in ranks:
            worker = self._live.get((epoch, rank))
            if worker is not None:
                worker.line.send(body)

    def send_to_all(self, message: worker_messages.Undriven) -> None:
        body = framing.frame(message)
        for worker in list(self._live.values()):
            worker.line.send(body)

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
        """Send a later driver what is here, and again all messages that no driver has acknowledged."""
        everybody = [*self._ended.values(), *self._live.values()]
        held = [worker.held() for worker in everybody]
        connection.send(wire.Inventory(held, lighthouse, self.memory.copies()))
        for worker in everybody:
            worker.line.repeat_to(connection)
            for uploaded in worker.uploaded:
                connection.send(uploaded)
            if worker.exited is not None:
                connection.send(worker.exited)
        connection.send(wire.HandedOver())

    # ------------------------------------------------------------------ ending

    def signal(self, worker: WorkerProcess, sig: int) -> None:
        worker.stop_signal = sig
        if not worker.pid:
            return
        if worker.template in self._fresh:
            worker.by_us = worker.by_us or not kernel.is_dying(worker.pid)
            kernel.send_signal(worker.pid, sig)
        else:
            worker.template.end(worker.pid, sig)

    def kill_all(self) -> None:
        for worker in list(self._live.values()):
            self.signal(worker, signal.SIGKILL)

    def _overflowed(self, worker: WorkerProcess) -> None:
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
            worker.stop_signal = signal.SIGKILL

    def reaped(self, pid: int, status: int, peak_rss: int) -> None:
        """A child of ours has ended: a fresh worker, or an orphan that became ours."""
        fresh = next((template for template in self._fresh if template.pid == pid), None)
        if fresh is not None:
            self._fresh.remove(fresh)
            fresh.drain()
            fresh.close()
        ended = [w for w in self._live.values() if w.pid == pid]
        left = [w for w in self._live.values() if w.template.pid == pid and w.pid != pid]
        if left:
            # A template that was let go leaves its workers to us; but it may have seen the end of some that
            # it could report to nobody, and never have forked others.
            children = {child for child, _ in kernel.children_of(os.getpid())}
            ended += [w for w in left if w.pid not in children]
        for worker in ended:
            self._end(worker, status, peak_rss)

    def template_died(self, template: TemplateProcess, status: int) -> None:
        """Those that it had not forked yet will never be. The others it takes along."""
        for worker in [w for w in self._live.values() if w.template is template and not w.pid]:
            self._end(worker, status, 0)

    def _end(self, worker: WorkerProcess, status: int, peak_rss: int) -> None:
        """The process is gone. All that it sent is passed on before its exit is."""
        del self._live[worker.key]
        worker.line.end()
        worker.memory.close()
        worker.output.close()
        worker.watched.page.close()
        worker.exited = exited(worker, status, peak_rss)
        self._ended[worker.key] = worker
        self._holder.send(worker.exited)
        # What it started (data loaders, helpers) goes with it; nobody waits for that.
        if worker.pid:
            self._loop.call_soon(kernel.kill_sessions, {worker.pid})
        self._uploads.clear_away(worker, lambda: scratch.remove(self._folder, Path(worker.spec.scratch)))
        self._on_ended(worker)

    def forget_ended(self) -> None:
        for worker in self._ended.values():
            worker.line.forget()
        self._ended = {}

    def close(self) -> None:
        """The run has left this host, and no worker is left."""
        for template in self._fresh:
            template.close()
        self._fresh = []
        self.forget_ended()
        self.peers.leave()
        self.memory.clear()

    def kill_everything(self) -> None:
        for template in self._fresh:
            template.kill()
        kernel.kill_sessions({worker.pid for worker in self._live.values() if worker.pid})
