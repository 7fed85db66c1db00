"""The agent: the one process of ours on a host. It starts, watches and ends the workers there.

It listens on a Unix socket in a folder of the user's alone, so that a later driver can find it again. It
decides nothing about the run: it does what the driver that holds it says, and tells what happened, in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

from everstep import kernel
from everstep.agent import descriptors
from everstep.agent.drivers import Beats, Connection, Holder
from everstep.agent.forwarder import Forwarder
from everstep.agent.guard import end_children
from everstep.agent.lighthouse import LighthouseProcess
from everstep.agent.preparation import Preparation
from everstep.agent.stops import Stops
from everstep.agent.watch import Watch
from everstep.agent.workers import HostWorkers, WorkerProcess
from everstep.control.failures import Kind
from everstep.protocol import wire, words

SOCKET = "agent.sock"
READY = "ready"
"""In the host's folder once the agent listens: the pid that its host goes by."""
DEFAULT_GRACE_S = 30.0
_END_S = 5.0


class Agent:
    """Who holds it, and what that driver's orders mean. What is done about workers, ``HostWorkers`` does."""

    def __init__(self, host: str, folder: Path, owner: tuple[int, int]) -> None:
        self.host = host
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._beats = Beats()
        self._connections: set[Connection] = set()
        self._holding = wire.Claim("", 0, 0.0, owner)
        """The claim that holds this host; of no run: nobody's has it."""
        self._holder = Holder()
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._workers = HostWorkers(folder, self._holder, self._worker_ended)
        self._preparation = Preparation(folder, self._holder, self._workers.template_said)
        self._stops = Stops(self._workers, self._holder)
        self._watch = Watch(self._workers)
        self._retiring = False
        self._leaving = Leaving(folder, self._holder)
        self._lighthouse = LighthouseHere(self._holder)

    async def serve(self, pid: int, tied: bool) -> None:
        """``pid`` is what its host goes by: its own, or its guardian's. ``tied``: end when standard input
        does, which the owner holds.
        """
        kernel.adopt_orphans()
        path = self._folder / SOCKET
        path.unlink(missing_ok=True)
        server = await self._loop.create_unix_server(lambda: Connection(self), str(path))
        os.chmod(path, 0o600)
        for sig, handler in (
            (signal.SIGCHLD, self._reap),
            (signal.SIGTERM, self._sigterm),
            (signal.SIGUSR1, self._leaving.cancelled),
            (signal.SIGHUP, self._done.set),
        ):
            self._loop.add_signal_handler(sig, handler)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._beats.start()
        if tied:
            self._loop.add_reader(0, self._done.set)
        (self._folder / f"{READY}.tmp").write_text(str(pid))
        (self._folder / f"{READY}.tmp").rename(self._folder / READY)
        watchers = [asyncio.create_task(self._watch_owner()), asyncio.create_task(self._watch.run())]
        try:
            await self._done.wait()
        finally:
            for watcher in watchers:
                watcher.cancel()
            server.close()
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

    def heard(self, connection: Connection, message: wire.AnyToAgent) -> None:
        match message:
            case wire.Attach():
                self._attach(connection, message)
            case wire.Claim():
                self._claim(connection, message)
            case _ if message.lease < self._holding.lease or connection is not self._holder.connection:
                pass  # a driver that was replaced has no say
            case wire.Unclaim():
                self._unclaim()
            case wire.Prepare():
                self._preparation.prepare(message)
            case wire.Start():
                self._start(message)
            case wire.Stop():
                self._stops.stop(message)
            case wire.Tell():
                self._workers.tell(message.epoch, message.ranks, message.body)
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
            case wire.Shutdown():
                self._done.set()

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
            return  # a driver of another version: it was told ours
        held = self._holding
        if held.run not in ("", message.run) or message.lease < held.lease:
            connection.send(self._status())
            return
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
            self._orphan_timer = None
        self._holding = message
        self._holder.take(connection)
        self._say_status()
        if message.lease > held.lease > 0:
            self._workers.tell_all(words.Undriven(False))
            self._workers.hand_over(connection, self._lighthouse.where)
        self._workers.adjust()
        self._leaving.tell_again()

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection is self._holder.connection:
            self._holder.take(None)
            # Its driver died without a word: the workers train on for a while, in case another claims them.
            self._workers.adjust()
            self._workers.tell_all(words.Undriven(True))
            self._orphan_timer = self._loop.call_later(self._holding.orphan_s, self._unclaim)

    def keeps_up(self, connection: Connection, does: bool) -> None:
        if connection is self._holder.connection:
            self._holder.keeps_up = does
            self._workers.adjust()

    def _unclaim(self) -> None:
        self._workers.kill_all()
        self._lighthouse.leave()
        self._preparation.close()
        self._workers.close()
        self._holding = wire.Claim("", 0, 0.0, self._holding.owner)
        self._holder.take(None)
        self._say_status()

    def _status(self, retired: bool = False) -> wire.Status:
        held = self._holding
        return wire.Status(
            self.host, wire.WIRE_VERSION, os.getpid(), held.run, held.lease, len(self._workers), retired
        )

    def _say_status(self, retired: bool = False) -> None:
        for connection in list(self._connections):
            connection.send(self._status(retired))

    # ------------------------------------------------------------------ workers

    def _start(self, message: wire.Start) -> None:
        if self._preparation.loaded is None:
            return  # it has died, and the driver is being told
        why_not = descriptors.shortage(len(message.workers))
        if why_not:
            self._holder.say(wire.Unprepared(Kind.LIMIT, why_not, ""))
            return
        try:
            self._workers.start(message.workers, self._preparation, self._lighthouse.forwarded)
        except OSError as error:
            # Those that were started are ended by the driver, with all others.
            self._holder.say(wire.Unprepared(Kind.START, f"a worker could not be started: {error}", ""))

    def _worker_ended(self, worker: WorkerProcess) -> None:
        self._stops.ended(worker)
        if not len(self._workers):
            self._loop.call_soon(self._kill_strays)
        self._check_retired()

    def _kill_strays(self) -> None:
        """No worker is left: whatever else has become our child is an orphan of one."""
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
            self._say_status(retired=True)

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
            self._leaving.noticed()
        else:
            self._done.set()


class LighthouseHere:
    """torchft's lighthouse, if this host has it, and where workers of this host reach it."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._lighthouse: LighthouseProcess | None = None
        self._forwarder: Forwarder | None = None

    @property
    def where(self) -> str:
        return self._lighthouse.where if self._lighthouse is not None else ""

    @property
    def pid(self) -> int:
        return self._lighthouse.pid if self._lighthouse is not None else 0

    @property
    def forwarded(self) -> str:
        """The address for this host's workers."""
        return f"http://{self._forwarder.address}" if self._forwarder is not None else ""

    def run(self, message: wire.RunLighthouse) -> None:
        self.stop()
        self._lighthouse = LighthouseProcess(message.address, message.options, self._is_up)

    def _is_up(self, address: str) -> None:
        if self._forwarder is not None:
            self._forwarder.point_at(address)  # the other hosts' need a driver, which may be away
        self._holder.say(wire.LighthouseUp(address))

    def forward(self, address: str) -> None:
        self._forwarder = self._forwarder or Forwarder()
        self._forwarder.point_at(address)

    def reaped(self, pid: int) -> bool:
        """A child of ours has ended. True if it was the lighthouse."""
        if self._lighthouse is None or pid != self._lighthouse.pid:
            return False
        self._lighthouse.died()
        return True

    def stop(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.stop()
            self._lighthouse = None

    def leave(self) -> None:
        """The run has left this host."""
        self.stop()
        if self._forwarder is not None:
            self._forwarder.close()
            self._forwarder = None


class Leaving:
    """The notice that this host will be taken away."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        self._folder = folder
        self._holder = holder
        self._deadline: float | None = None

    def noticed(self) -> None:
        grace = DEFAULT_GRACE_S
        try:
            grace = float((self._folder / "grace_s").read_text())
        except (OSError, ValueError):
            pass  # nobody said how long: the usual notice
        self._deadline = time.monotonic() + grace
        self._holder.say(wire.Noticed(grace))

    def cancelled(self) -> None:
        self._deadline = None
        self._holder.say(wire.Noticed(None))

    def tell_again(self) -> None:
        """To a driver that has not heard of it."""
        if self._deadline is not None:
            self._holder.say(wire.Noticed(max(0.0, self._deadline - time.monotonic())))
