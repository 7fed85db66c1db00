"""The agent: the one process of ours on a host. It starts, watches and ends the workers there.

It listens on a Unix socket in a folder of the user's alone, so that a later driver can find it again. It
decides nothing about the run: it carries out the orders of the driver that holds it, and reports what
happens, in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

from everstep.agent import descriptors
from everstep.agent.drivers import Beats, Connection, Holder
from everstep.agent.guard import end_children
from everstep.agent.preparation import Preparation
from everstep.agent.sockets import SOCKET
from everstep.agent.stops import Stops
from everstep.agent.watch import Watch
from everstep.agent.worker_process import WorkerProcess
from everstep.agent.workers import HostWorkers
from everstep.errors import StorageAccessError
from everstep.failures import Kind
from everstep.process import kernel
from everstep.protocol import wire, worker_messages
from everstep.torchft.on_host import HostLighthouse

READY = "ready"
"""In the host's folder once the agent listens: the pid that its host goes by."""
DEFAULT_GRACE_S = 30.0
_END_S = 5.0


class Agent:
    """Which driver holds it, and what that driver's orders mean. ``HostWorkers`` has the workers."""

    def __init__(self, host: str, folder: Path, owner: tuple[int, int]) -> None:
        self.host = host
        self._folder = folder
        self._done = asyncio.Event()
        self._beats = Beats()
        self._connections: set[Connection] = set()
        self._holding = wire.Claim("", 0, 0.0, owner)
        """The claim that holds this host; of no run: nobody holds it."""
        self._holder = Holder()
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._workers = HostWorkers(folder, self._holder, self._worker_ended)
        self._preparation = Preparation(folder, self._holder, self._workers.on_template_message)
        self._stops = Stops(self._workers, self._holder)
        self._watch = Watch(self._workers, self._holder)
        self._retiring = False
        self._notice = HostNotice(folder, self._holder)
        self._lighthouse = HostLighthouse(self._holder.send)

    async def serve(self, pid: int, tied: bool) -> None:
        """``pid`` is what its host goes by: its own, or its guardian's. ``tied``: end when standard input
        does, which the owner holds.
        """
        kernel.adopt_orphans()
        loop = asyncio.get_running_loop()
        path = self._folder / SOCKET
        path.unlink(missing_ok=True)
        server = await loop.create_unix_server(lambda: Connection(self), str(path))
        os.chmod(path, 0o600)
        peers = await self._workers.peers.serve()
        for sig, handler in (
            (signal.SIGCHLD, self._reap),
            (signal.SIGTERM, self._sigterm),
            (signal.SIGUSR1, self._notice.cancelled),
            (signal.SIGHUP, self._done.set),
        ):
            loop.add_signal_handler(sig, handler)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._beats.start()
        if tied:
            loop.add_reader(0, self._done.set)
        (self._folder / f"{READY}.tmp").write_text(str(pid))
        (self._folder / f"{READY}.tmp").rename(self._folder / READY)
        watchers = [asyncio.create_task(self._watch_owner()), asyncio.create_task(self._watch.run())]
        try:
            await self._done.wait()
        finally:
            for watcher in watchers:
                watcher.cancel()
            server.close()
            peers.close()
            path.unlink(missing_ok=True)
            self._end_everything()

    async def _watch_owner(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            # Without its socket (a runtime folder that went with a login) nobody can ever claim it again.
            lost = self._holder.connection is None and not (self._folder / SOCKET).exists()
            pid, started = self._holding.owner
            if lost or (not self._holding.run and kernel.start_time(pid) != started):
                self._done.set()

    # ------------------------------------------------------------------ drivers

    def received(self, connection: Connection, message: wire.AnyToAgent) -> None:
        match message:
            case wire.Attach():
                self._attach(connection, message)
            case wire.Retire() if not self._holding.run:
                self._retiring = True  # nobody holds it: all is ending, or has ended
                self._check_retired()
            case _ if not self._holding.run and len(self._workers):
                self._holder.waiting.append((connection, message))  # nothing is started beside them
            case wire.Claim():
                self._claim(connection, message)
            case _ if message.lease < self._holding.lease or connection is not self._holder.connection:
                pass  # orders of a driver that was replaced don't count
            case wire.Unclaim():
                self._unclaim()
            case wire.Prepare():
                self._preparation.prepare(message)
            case wire.Start():
                self._start(message)
            case wire.CopySlot():
                self._workers.peers.copy(message)
            case wire.KeepSlots():
                self._workers.memory.keep_copies(message.kept)
            case wire.Stop():
                self._stops.stop(message)
            case wire.ToWorkers():
                self._workers.send_to(message.epoch, message.ranks, message.body)
            case wire.Acknowledge():
                self._workers.acknowledged(message)
            case wire.Examine():
                self._watch.examine(message)
            case wire.RunLighthouse():
                self._lighthouse.run(message)
            case wire.Forward():
                self._lighthouse.forward(message.address)
            case wire.Retire():
                self._lighthouse.stop()
                self._retiring = True
                self._workers.kill_all()
                self._check_retired()

    def _attach(self, connection: Connection, message: wire.Attach) -> None:
        assert connection.transport is not None
        if message.beat_s > 0:
            sock: socket.socket = connection.transport.get_extra_info("socket")
            # asyncio keeps its own descriptor; the thread that beats has another, of the same socket.
            self._beats.add(socket.socket(fileno=os.dup(sock.fileno())), message.beat_s)
            return
        if message.version == wire.WIRE_VERSION:
            self._connections.add(connection)
        connection.send(self._status())

    def _claim(self, connection: Connection, message: wire.Claim) -> None:
        if connection not in self._connections:
            return  # a driver of another version: it has received ours
        held = self._holding
        if held.run not in ("", message.run) or message.lease < held.lease:
            connection.send(self._status())
            return
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
            self._orphan_timer = None
        self._holding = message
        self._workers.peers.run = message.run
        self._holder.attach(connection)
        self._send_status()
        if message.lease > held.lease > 0:
            self._workers.send_to_all(worker_messages.Undriven(False))
            self._preparation.repeat_failure()
            self._workers.hand_over(connection, self._lighthouse.where)
        self._workers.adjust()
        self._notice.repeat()

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection is self._holder.connection:
            self._holder.attach(None)
            # Its driver died: the workers train on for a while, in case another one claims them.
            self._workers.adjust()
            self._workers.send_to_all(worker_messages.Undriven(True))
            self._orphan_timer = asyncio.get_running_loop().call_later(self._holding.orphan_s, self._unclaim)

    def keeps_up(self, connection: Connection, does: bool) -> None:
        if connection is self._holder.connection:
            self._holder.keeps_up = does
            self._workers.adjust()

    def _unclaim(self) -> None:
        """Nobody holds it from now on, and nobody can before its workers are gone."""
        self._retiring = True  # a driver that was replaced may wait for that, and its messages don't count
        self._workers.kill_all()
        self._lighthouse.leave()
        self._preparation.close()
        self._holding = wire.Claim("", 0, 0.0, self._holding.owner)
        self._holder.attach(None)
        self._send_status()
        self._check_retired()

    def _status(self, retired: bool = False) -> wire.Status:
        held = self._holding
        return wire.Status(
            self.host, wire.WIRE_VERSION, os.getpid(), held.run, held.lease, len(self._workers), retired
        )

    def _send_status(self, retired: bool = False) -> None:
        for connection in list(self._connections):
            connection.send(self._status(retired))

    # ------------------------------------------------------------------ workers

    def _start(self, message: wire.Start) -> None:
        if self._preparation.loaded is None:
            return  # it has died, and ``Unprepared`` is on its way to the driver
        why_not = descriptors.shortage(message.workers)
        if why_not:
            self._holder.send(wire.Unprepared(Kind.LIMIT, why_not, ""))
            return
        try:
            self._workers.peers.sources = message.sources
            self._workers.start(message.workers, self._preparation, self._lighthouse.forwarded)
        except StorageAccessError as error:
            self._holder.send(wire.Unprepared(Kind.STORAGE, str(error), ""))
        except OSError as error:
            # Those that were started are ended by the driver, with all others.
            self._holder.send(wire.Unprepared(Kind.START, f"a worker could not be started: {error}", ""))

    def _worker_ended(self, worker: WorkerProcess) -> None:
        self._stops.ended(worker)
        if not len(self._workers):
            asyncio.get_running_loop().call_soon(self._kill_strays)
        self._check_retired()

    def _kill_strays(self) -> None:
        """No worker is left: any other child of ours is an orphan of one."""
        if len(self._workers):
            return
        template = self._preparation.template
        known = self._workers.pids() | {self._lighthouse.pid} | ({template.pid} if template else set())
        for pid, session in kernel.children_of(os.getpid()):
            if pid not in known:
                kernel.kill_sessions({session} - {os.getsid(0)})
                kernel.send_signal(pid, signal.SIGKILL)

    def _check_retired(self) -> None:
        if self._retiring and not len(self._workers):
            self._retiring = False
            if not self._holding.run:
                self._workers.close()
            self._send_status(retired=True)
            waiting, self._holder.waiting = self._holder.waiting, []
            for connection, message in waiting:
                self.received(connection, message)

    def _reap(self) -> None:
        """Children that ended: the template, fresh workers, and orphans that became ours."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._preparation.template is not None and pid == self._preparation.template.pid:
                self._workers.template_died(self._preparation.template_died(status), status)
            elif not self._lighthouse.reaped(pid):
                self._workers.reaped(pid, status, usage.ru_maxrss * 1024)

    def _end_everything(self) -> None:
        if self._preparation.template is not None:
            self._preparation.template.kill()
        self._workers.kill_everything()
        if kernel.HAS_DEATH_SIGNALS:
            end_children(_END_S)

    def _sigterm(self) -> None:
        if self._holding.run:
            self._notice.noticed()
        else:
            self._done.set()


class HostNotice:
    """The notice that this host will be taken away.

    SIGTERM, while a run holds the host: the machine goes, after as many seconds as ``grace_s`` in the host's
    folder says, else 30. SIGUSR1: it stays after all. An agent that no run holds just ends.
    """

    def __init__(self, folder: Path, holder: Holder) -> None:
        self._folder = folder
        self._holder = holder
        self._deadline: float | None = None
        self._cancellation_unsent = False
        """It was taken back while there was no driver: the next one has read of the notice in the journal,
        and doesn't know that it is cancelled.
        """

    def noticed(self) -> None:
        grace = DEFAULT_GRACE_S
        try:
            grace = float((self._folder / "grace_s").read_text())
        except (OSError, ValueError):
            pass  # the usual notice, then
        self._deadline = time.monotonic() + grace
        self._holder.send(wire.Noticed(grace))

    def cancelled(self) -> None:
        self._deadline = None
        self._cancellation_unsent = self._holder.connection is None
        self._holder.send(wire.Noticed(None))

    def repeat(self) -> None:
        """Send it to a later driver. How much time is left is known here: clocks of drivers may have been
        set, and differ.
        """
        if self._deadline is not None:
            self._holder.send(wire.Noticed(max(0.0, self._deadline - time.monotonic())))
        elif self._cancellation_unsent:
            self._cancellation_unsent = False
            self._holder.send(wire.Noticed(None))
