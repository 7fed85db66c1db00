"""The agent: the one process of ours on a host. It starts, watches and ends the workers there.

It listens on a Unix socket in a folder of the user's alone, so that a later driver can find it again. It
decides nothing about the run: it does what the driver that holds it says, and tells what happened, in order.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.agent import kernel, wire
from everstep.agent.forwarder import Forwarder
from everstep.agent.lighthouse import Lighthouse
from everstep.agent.logs import WorkerLog
from everstep.agent.spawner import Recipe, Template
from everstep.agent.spool import Spool
from everstep.control.failures import Kind

SOCKET = "agent.sock"
_STORAGE_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
_READ = 1 << 18
_HIGH_WATER = 64 << 20
DEFAULT_GRACE_S = 30.0


@dataclass
class Worker:
    """One worker process and its two ways out: messages and output."""

    spec: wire.WorkerSpec
    template: Template
    sock: socket.socket
    out: int
    log: WorkerLog
    oom_before: int
    pid: int = 0
    spool: Spool = field(init=False)
    state: bytes = b""
    """What the driver said of all that the spool no longer holds."""
    uploaded: list[wire.Uploaded] = field(default_factory=list)
    """What we uploaded in its place."""
    exited: wire.Exited | None = None
    kill: int = 0
    """A signal that it is to get as soon as it has a pid."""
    by_us: bool = False

    def __post_init__(self) -> None:
        self.spool = Spool(Path(f"{self.log.path}.spool"))

    @property
    def key(self) -> tuple[int, int]:
        return (self.spec.epoch, self.spec.member.rank)


@dataclass
class StopJob:
    """Ranks that are to be gone, and the word owed when they are."""

    epoch: int
    generation: int
    ranks: list[int]
    left: set[int]
    pids: set[int] = field(default_factory=set)


class Beats(threading.Thread):
    """Says that the host lives. Shares no thread with anything that may wait."""

    def __init__(self) -> None:
        super().__init__(name="everstep-beats", daemon=True)
        self._sockets: list[tuple[socket.socket, float]] = []
        self._changed = threading.Event()

    def add(self, sock: socket.socket, interval: float) -> None:
        sock.setblocking(False)
        self._sockets = [*self._sockets, (sock, interval)]
        self._changed.set()

    def run(self) -> None:
        beat = wire.frame(wire.Beat())
        while True:
            sockets = self._sockets
            if not sockets:
                self._changed.wait()
                self._changed.clear()
                continue
            for entry in sockets:
                try:
                    entry[0].send(beat)
                except BlockingIOError:
                    pass  # a driver that doesn't read doesn't need more of them
                except OSError:
                    entry[0].close()
                    self._sockets = [e for e in self._sockets if e is not entry]
            time.sleep(min(interval for _, interval in sockets))


class Connection(asyncio.Protocol):
    """A driver's connection."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._frames = wire.Frames()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._agent.heard(self, wire.to_agent.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._agent.lost(self)

    def pause_writing(self) -> None:
        self._agent.hold_workers(self, True)

    def resume_writing(self) -> None:
        self._agent.hold_workers(self, False)

    def send(self, message: wire.AnyFromAgent) -> None:
        if self.transport is not None:
            self.transport.write(wire.frame(message))


class Agent:
    def __init__(self, host: str, folder: Path, owner: tuple[int, int], tied: bool = False) -> None:
        """``tied``: end when standard input does, which the owner holds."""
        self.host = host
        self._folder = folder
        self._owner = owner
        self._tied = tied
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._beats = Beats()
        self._connections: set[Connection] = set()
        self._run = ""
        self._lease = 0
        self._orphan_s = 0.0
        self._holder: Connection | None = None
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._template: Template | None = None
        self._loaded: wire.Loaded | None = None
        self._looking: wire.Prepare | None = None
        """The order whose storage is being looked at, or was found wanting."""
        self._fresh: list[Template] = []
        self._fresh_loaded: set[int] = set()
        self._workers: dict[tuple[int, int], Worker] = {}
        self._ended_workers: dict[tuple[int, int], Worker] = {}
        """Of the present epoch: a later driver must hear how they ended."""
        self._stops: list[StopJob] = []
        self._retiring = False
        self._noticed: float | None = None
        self._held_back = False
        self._lighthouse: Lighthouse | None = None
        self._forwarder: Forwarder | None = None

    async def serve(self) -> None:
        kernel.adopt_orphans()
        path = self._folder / SOCKET
        path.unlink(missing_ok=True)
        server = await self._loop.create_unix_server(lambda: Connection(self), str(path))
        os.chmod(path, 0o600)
        for sig, handler in (
            (signal.SIGCHLD, self._reap),
            (signal.SIGTERM, self._sigterm),
            (signal.SIGUSR1, self._notice_cancelled),
        ):
            self._loop.add_signal_handler(sig, handler)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._beats.start()
        if self._tied:
            self._loop.add_reader(0, self._done.set)
        (self._folder / "ready.tmp").write_text(str(os.getpid()))
        (self._folder / "ready.tmp").rename(self._folder / "ready")
        watcher = asyncio.create_task(self._watch_owner())
        try:
            await self._done.wait()
        finally:
            watcher.cancel()
            server.close()
            path.unlink(missing_ok=True)
            self._end_everything()

    async def _watch_owner(self) -> None:
        pid, started = self._owner
        while True:
            await asyncio.sleep(1.0)
            # Without its socket (a runtime folder that went with a login) nobody can ever claim it again.
            lost = self._holder is None and not (self._folder / SOCKET).exists()
            if lost or (not self._run and kernel.start_time(pid) != started):
                self._done.set()

    # ------------------------------------------------------------------ drivers

    def heard(self, connection: Connection, message: wire.AnyToAgent) -> None:
        match message:
            case wire.Attach():
                self._attach(connection, message)
            case wire.Claim():
                self._claim(connection, message)
            case _ if message.lease < self._lease or connection is not self._holder:
                pass  # a driver that was replaced has no say
            case wire.Unclaim():
                self._unclaim()
            case wire.Prepare():
                self._prepare(message)
            case wire.Start():
                if any(spec.epoch > epoch for spec in message.workers for epoch, _ in self._ended_workers):
                    self._forget_ended()
                for spec in message.workers:
                    self._start(spec)
            case wire.Stop():
                self._stop(message)
            case wire.Tell():
                for rank in message.ranks:
                    self._tell(message.epoch, rank, message.body)
            case wire.Acknowledge():
                self._acknowledged(message)
            case wire.RunLighthouse():
                self._stop_lighthouse()
                self._lighthouse = Lighthouse(message.address, message.options, self._lighthouse_is_up)
            case wire.Forward():
                self._forwarder = self._forwarder or Forwarder()
                self._forwarder.point_at(message.address)
            case wire.Retire():
                self._stop_lighthouse()
                self._retiring = True
                self._kill_all()
                self._check_retired()
            case wire.Shutdown():
                self._done.set()

    def _attach(self, connection: Connection, message: wire.Attach) -> None:
        assert connection.transport is not None
        if message.beat_s > 0:
            sock: socket.socket = connection.transport.get_extra_info("socket")
            # asyncio keeps its own descriptor; the thread that beats has another, of the same socket.
            self._beats.add(socket.socket(fileno=os.dup(sock.fileno())), message.beat_s)
            return
        self._connections.add(connection)
        connection.send(self._status())

    def _claim(self, connection: Connection, message: wire.Claim) -> None:
        if self._run in ("", message.run) and message.lease >= self._lease:
            if self._orphan_timer is not None:
                self._orphan_timer.cancel()
                self._orphan_timer = None
            later = message.lease > self._lease > 0
            self._run, self._lease, self._orphan_s = message.run, message.lease, message.orphan_s
            self._owner = message.owner
            self._holder = connection
            self._say_status()
            if later:
                self._tell_all(wire.Undriven(False))
                self._hand_over(connection)
            if self._noticed is not None:
                connection.send(wire.Noticed(max(0.0, self._noticed - time.monotonic())))
        else:
            connection.send(self._status())

    def _hand_over(self, connection: Connection) -> None:
        """Tell a later driver what is here, and again all that nobody has dealt with."""
        self._held_back = False
        everybody = [*self._ended_workers.values(), *self._workers.values()]
        held = [wire.Held(w.spec, w.pid, w.spool.acknowledged, w.state, bool(w.kill)) for w in everybody]
        connection.send(wire.Inventory(held, self._lighthouse.where if self._lighthouse else ""))
        for worker in everybody:
            spec = worker.spec
            for offset, data in worker.spool.chunks():
                connection.send(wire.FromWorker(spec.epoch, spec.generation, spec.member.rank, offset, data))
            for uploaded in worker.uploaded:
                connection.send(uploaded)
            if worker.exited is not None:
                connection.send(worker.exited)
            elif not worker.spool.full:
                self._loop.add_reader(worker.sock, self._read_messages, worker)
        connection.send(wire.HandedOver())

    def _acknowledged(self, message: wire.Acknowledge) -> None:
        for generation, rank, offset, state in message.ranks:
            key = (message.epoch, rank)
            worker = self._workers.get(key) or self._ended_workers.get(key)
            if worker is None or worker.spec.generation != generation:
                continue
            was_full = worker.spool.full
            worker.spool.acknowledge(offset)
            worker.state = state
            if was_full and not worker.spool.full and worker.exited is None and not self._held_back:
                self._loop.add_reader(worker.sock, self._read_messages, worker)

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection is self._holder:
            self._holder = None
            # Its driver died without a word: the workers train on for a while, in case another claims them.
            self._tell_all(wire.Undriven(True))
            self._orphan_timer = self._loop.call_later(self._orphan_s, self._unclaim)

    def _unclaim(self) -> None:
        self._kill_all()
        self._stop_lighthouse()
        if self._forwarder is not None:
            self._forwarder.close()
            self._forwarder = None
        for template in [*([self._template] if self._template else []), *self._fresh]:
            template.close()
        self._template = self._loaded = None
        self._fresh = []
        self._forget_ended()
        self._run, self._lease, self._holder = "", 0, None
        self._say_status()

    def _status(self, retired: bool = False) -> wire.Status:
        return wire.Status(
            self.host, wire.WIRE_VERSION, os.getpid(), self._run, self._lease, len(self._workers), retired
        )

    def _say_status(self) -> None:
        for connection in list(self._connections):
            connection.send(self._status())

    def _say(self, message: wire.AnyFromAgent) -> None:
        if self._holder is not None:
            self._holder.send(message)

    # ------------------------------------------------------------------ the template

    def _prepare(self, message: wire.Prepare) -> None:
        # Where frameworks may keep what they compiled: this machine's, and gone with its last host.
        cache = self._folder.parent / "cache"
        cache.mkdir(mode=0o700, exist_ok=True)
        message = _at_home(message) if message.elsewhere else message
        recipe = Recipe(
            wire.Load(
                message.code,
                message.config,
                message.python_path,
                message.preload,
                message.probe_s,
                hasattr(os, "pidfd_open"),
            ),
            {**message.env, "EVERSTEP_CACHE": str(cache)},
            message.cwd,
        )
        if self._template is None or self._template.recipe != recipe:
            if self._template is not None:
                self._template.close()
            self._loaded = None
            self._template = Template(recipe, self._template_said)
        # What we read and write for our workers goes to the same place, with the same rights.
        os.environ.update({k: v for k, v in message.env.items() if k.startswith(_STORAGE_VARIABLES)})
        # Beside the template's imports, which take longer.
        self._looking = message
        threading.Thread(target=self._look_at_storage, args=(message,), daemon=True).start()

    def _look_at_storage(self, message: wire.Prepare) -> None:
        from everstep.errors import StorageAccessError, StorageError
        from everstep.storage.shared import look_for_marker
        from everstep.storage.store import open_store

        refusal: wire.Unprepared | None = None
        try:
            run = open_store(message.run_folder, message.storage_options, message.storage_limits)
            look_for_marker(run, message.marker)
        except (StorageError, OSError) as error:
            kind = Kind.STORAGE if isinstance(error, StorageAccessError) else Kind.START
            refusal = wire.Unprepared(kind, str(error), "")
        self._loop.call_soon_threadsafe(self._looked, message, refusal)

    def _looked(self, message: wire.Prepare, refusal: wire.Unprepared | None) -> None:
        if message is not self._looking:
            return  # asked again meanwhile
        if refusal is not None:
            self._say(refusal)
            return
        self._looking = None
        self._check_prepared()

    def _check_prepared(self) -> None:
        if self._loaded is not None and self._looking is None:
            self._say(wire.Prepared(self._loaded.forks, self._loaded.why_not, self._loaded.seconds))

    def _template_said(self, template: Template, word: wire.AnyWord) -> None:
        match word:
            case wire.Loaded():
                if template is self._template:
                    self._loaded = word
                    self._check_prepared()
            case wire.LoadFailed():
                self._say(wire.Unprepared(Kind.LOAD, word.message, word.traceback))
            case wire.Forked():
                self._forked(word)
            case wire.Ended():
                worker = next((w for w in self._workers.values() if w.pid == word.pid), None)
                if worker is not None:
                    worker.by_us = word.by_us
                    self._ended(worker, word.status, word.peak_rss)

    def _template_died(self, status: int) -> None:
        assert self._template is not None
        template, self._template, self._loaded = self._template, None, None
        template.drain()
        template.close()
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._say(wire.Unprepared(Kind.TEMPLATE, f"the template process died ({how})", ""))
        for worker in [w for w in self._workers.values() if w.template is template and not w.pid]:
            self._ended(worker, status, 0)

    # ------------------------------------------------------------------ workers

    def _forget_ended(self) -> None:
        for worker in self._ended_workers.values():
            worker.spool.close()
        self._ended_workers = {}

    def _start(self, spec: wire.WorkerSpec) -> None:
        template = self._template
        if template is None or self._loaded is None:
            return  # it has died, and the driver is being told
        if not self._loaded.forks:
            load = template.recipe.load
            fresh = wire.Load(
                load.code, load.config, load.python_path, load.preload, load.probe_s, may_fork=False
            )
            template = Template(Recipe(fresh, template.recipe.env, template.recipe.cwd), self._template_said)
            self._fresh.append(template)
        spool = self._folder / "spool" / f"{spec.epoch}.{spec.generation}.{spec.member.rank}"
        before = self._ended_workers.pop((spec.epoch, spec.member.rank), None)
        if before is not None:  # of an earlier generation of its group, which nobody takes over any more
            before.spool.close()
        lighthouse = f"http://{self._forwarder.address}" if self._forwarder is not None else ""
        spec = msgspec.structs.replace(spec, spool=str(spool), lighthouse=lighthouse)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        out, into = os.pipe()
        os.set_blocking(out, False)
        try:
            fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, 1 << 20)
        except (OSError, AttributeError):
            pass  # the usual size does, too
        worker = Worker(spec, template, ours, out, WorkerLog(spec.log_path), kernel.oom_kills())
        self._workers[worker.key] = worker
        template.fork(spec, theirs.fileno(), into)
        theirs.close()
        os.close(into)
        self._listen(worker)

    def _listen(self, worker: Worker) -> None:
        self._loop.add_reader(worker.out, self._read_output, worker)
        if not self._held_back:
            self._loop.add_reader(worker.sock, self._read_messages, worker)

    def _forked(self, word: wire.Forked) -> None:
        worker = self._workers.get((word.epoch, word.rank))
        if worker is None:
            return
        worker.pid = word.pid
        self._say(wire.Spawned(word.epoch, worker.spec.generation, word.rank, word.pid))
        if worker.kill:
            self._signal(worker, worker.kill)

    def _read_messages(self, worker: Worker) -> bool:
        """Pass on what a worker sent. True if there may be more."""
        try:
            data = worker.sock.recv(_READ)
        except (BlockingIOError, ConnectionError):
            return False
        if not data:
            self._loop.remove_reader(worker.sock)
            return False
        spec = worker.spec
        offset = worker.spool.end
        worker.spool.append(data)
        self._say(wire.FromWorker(spec.epoch, spec.generation, spec.member.rank, offset, data))
        if worker.spool.full:
            # Nothing is dropped: the worker waits in report() until a driver has dealt with what it said.
            self._loop.remove_reader(worker.sock)
        return True

    def _read_output(self, worker: Worker) -> bool:
        try:
            data = os.read(worker.out, _READ)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(worker.out)
            return False
        worker.log.write(data)
        if worker.spec.echo:
            self._say(wire.Output(worker.spec.member.rank, data.decode(errors="replace")))
        return True

    def hold_workers(self, connection: Connection, hold: bool) -> None:
        """The driver doesn't keep up: leave the workers' messages where they are until it does."""
        if connection is not self._holder:
            return
        self._held_back = hold
        for worker in self._workers.values():
            if hold:
                self._loop.remove_reader(worker.sock)
            else:
                self._loop.add_reader(worker.sock, self._read_messages, worker)

    def _tell_all(self, message: wire.Undriven) -> None:
        body = wire.frame(message)
        for epoch, rank in self._workers:
            self._tell(epoch, rank, body)

    def _tell(self, epoch: int, rank: int, body: bytes) -> None:
        worker = self._workers.get((epoch, rank))
        if worker is None:
            return
        try:
            sent = worker.sock.send(body)
        except (BlockingIOError, BrokenPipeError, ConnectionError):
            sent = 0
        if 0 < sent < len(body):
            # A frame cut in half would garble all that follows: this one time, wait for the rest to go.
            worker.sock.setblocking(True)
            try:
                worker.sock.sendall(body[sent:])
            except (BrokenPipeError, ConnectionError):
                pass
            worker.sock.setblocking(False)

    def _ended(self, worker: Worker, status: int, peak_rss: int) -> None:
        """The process is gone. All that it sent is told before that."""
        del self._workers[worker.key]
        self._loop.remove_reader(worker.sock)
        self._loop.remove_reader(worker.out)
        while self._read_messages(worker):
            pass
        while self._read_output(worker):
            pass
        worker.sock.close()
        os.close(worker.out)
        worker.log.close()
        code = os.waitstatus_to_exitcode(status)
        spec = worker.spec
        worker.exited = wire.Exited(
            spec.epoch,
            spec.generation,
            spec.member.rank,
            time.monotonic(),
            code if code >= 0 else None,
            -code if code < 0 else None,
            worker.by_us,
            code == -signal.SIGKILL and not worker.by_us and kernel.oom_kills() > worker.oom_before,
            peak_rss,
            worker.log.tail,
            spec.log_path,
        )
        self._ended_workers[worker.key] = worker
        self._say(worker.exited)
        if Path(spec.spool).is_dir():
            # A report that returned is kept: what it was uploading is uploaded by us, beside all else.
            threading.Thread(target=self._finish_uploads, args=(worker,), daemon=True).start()
        for job in list(self._stops):
            if job.epoch == spec.epoch and spec.member.rank in job.left:
                job.left.discard(spec.member.rank)
                job.pids.add(worker.pid)
                self._check_stopped(job)
        # What it started (data loaders, helpers) goes with it; nobody waits for that.
        self._loop.call_soon(kernel.kill_sessions, {worker.pid})
        if not self._workers:
            self._loop.call_soon(self._kill_strays)
        self._check_retired()

    def _finish_uploads(self, worker: Worker) -> None:
        from everstep.errors import StorageError
        from everstep.storage import snapshots
        from everstep.storage.store import open_store

        spec = worker.spec
        who = (spec.epoch, spec.generation, spec.member.rank)
        for job in snapshots.pending(Path(spec.spool)):
            index = snapshots.read(job).share.index
            try:
                part = snapshots.finish(
                    job, open_store(spec.run_folder, spec.storage_options, spec.storage_limits)
                )
                word = wire.Uploaded(*who, index, part)
            except (StorageError, OSError) as error:
                word = wire.Uploaded(*who, index, None, f"{type(error).__name__}: {error}")
            snapshots.forget(job)
            self._loop.call_soon_threadsafe(self._has_uploaded, worker, word)

    def _has_uploaded(self, worker: Worker, word: wire.Uploaded) -> None:
        worker.uploaded.append(word)
        self._say(word)

    def _kill_strays(self) -> None:
        """No worker is left: whatever else has become our child is an orphan of one."""
        if self._workers:
            return
        known = {t.pid for t in [self._template, self._lighthouse, *self._fresh] if t is not None}
        for pid, session in kernel.children_of(os.getpid()):
            if pid not in known:
                kernel.kill_sessions({session} - {os.getsid(0)})
                kernel.send_signal(pid, signal.SIGKILL)

    # ------------------------------------------------------------------ ending workers

    def _stop(self, message: wire.Stop) -> None:
        job = StopJob(message.epoch, message.generation, message.ranks, set())
        for rank in message.ranks:
            worker = self._workers.get((message.epoch, rank))
            if worker is not None and worker.spec.generation == message.generation:
                job.left.add(rank)
                self._signal(worker, signal.SIGTERM if message.grace_s > 0 else signal.SIGKILL)
        self._stops.append(job)
        if message.grace_s > 0 and job.left:
            self._loop.call_later(message.grace_s, self._kill_job, job)
        self._check_stopped(job)

    def _kill_job(self, job: StopJob) -> None:
        for rank in list(job.left):
            worker = self._workers.get((job.epoch, rank))
            if worker is not None:
                self._signal(worker, signal.SIGKILL)

    def _check_stopped(self, job: StopJob) -> None:
        if not job.left and job in self._stops:
            self._stops.remove(job)
            self._say(wire.Gone(job.epoch, job.generation, job.ranks))

    def _signal(self, worker: Worker, sig: int) -> None:
        worker.kill = sig
        if not worker.pid:
            return
        if worker.template in self._fresh:
            worker.by_us = True
            kernel.send_signal(worker.pid, sig)
        else:
            worker.template.end(worker.pid, sig)

    def _kill_all(self) -> None:
        for worker in list(self._workers.values()):
            self._signal(worker, signal.SIGKILL)

    def _check_retired(self) -> None:
        if self._retiring and not self._workers:
            self._retiring = False
            for connection in list(self._connections):
                connection.send(self._status(retired=True))

    def _reap(self) -> None:
        """Children that ended: the template, fresh workers, and orphans that became ours."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._template is not None and pid == self._template.pid:
                self._template_died(status)
                continue
            if self._lighthouse is not None and pid == self._lighthouse.pid:
                self._lighthouse.died()
                continue
            fresh = next((t for t in self._fresh if t.pid == pid), None)
            if fresh is not None:
                self._fresh.remove(fresh)
                fresh.drain()
                fresh.close()
            worker = next(
                (w for w in self._workers.values() if w.pid == pid or w.template is fresh is not None), None
            )
            if worker is not None:
                self._ended(worker, status, usage.ru_maxrss * 1024)

    def _end_everything(self) -> None:
        sessions = {worker.pid for worker in self._workers.values() if worker.pid}
        for template in [self._template, *self._fresh]:
            if template is not None:
                template.kill()
        kernel.kill_sessions(sessions)
        for pid in kernel.descendants(os.getpid()):
            kernel.send_signal(pid, signal.SIGKILL)

    # ------------------------------------------------------------------ the lighthouse

    def _lighthouse_is_up(self, address: str) -> None:
        if self._forwarder is not None:
            self._forwarder.point_at(address)  # the other hosts' need a driver, which may be away
        self._say(wire.LighthouseUp(address))

    def _stop_lighthouse(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.stop()
            self._lighthouse = None

    # ------------------------------------------------------------------ being taken away

    def _sigterm(self) -> None:
        if not self._run:
            self._done.set()
            return
        grace = DEFAULT_GRACE_S
        try:
            grace = float((self._folder / "grace_s").read_text())
        except (OSError, ValueError):
            pass  # nobody said how long: the usual notice
        self._noticed = time.monotonic() + grace
        self._say(wire.Noticed(grace))

    def _notice_cancelled(self) -> None:
        self._noticed = None
        self._say(wire.Noticed(None))


def _at_home(message: wire.Prepare) -> wire.Prepare:
    """The same order in terms of this machine: its environment, with what the driver adds to it."""
    mine = [path for path in sys.path if path]
    theirs = [path for path in message.python_path if path not in mine and os.path.exists(path)]
    there = bool(message.cwd) and os.path.isdir(message.cwd)
    return msgspec.structs.replace(
        message,
        env={**os.environ, **message.env},
        python_path=mine + theirs,
        cwd=message.cwd if there else os.getcwd(),
    )


def raise_file_limit() -> None:
    """Two descriptors a worker, and more for its log."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EPERM:
                raise
