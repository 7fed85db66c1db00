"""The actor on a node: it starts the node's agent, and passes messages between it and the driver.

The agent is a process of its own, the same as on one machine: an actor has threads, and nothing can be forked
from it. The actor holds the other end of the agent's standard input, so that neither outlives the other.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import ray

from everstep.agent import raynode
from everstep.agent.sockets import PEER_SOCKET, RELAY_SOCKET, SOCKET
from everstep.engine.local.cluster import runtime_folder
from everstep.engine.ray import cluster
from everstep.engine.ray.relay import Relay, ask_agent
from everstep.process import kernel
from everstep.protocol import framing, wire

START_S = 60.0
"""How long an agent may take to start; also how long it waits for an earlier one on the same node to end."""
END_S = 10.0
_READ = 1 << 20
_FULL = 64 << 20
_DOUBT_S = 3.0
_RAYLET_S = 0.1
_SILENT_S = 60.0

AGENT_DIED = "its agent died"
RAYLET_DIED = "its raylet died"

CONCURRENCY_GROUPS = {"orders": 1, "words": 4, "beats": 2, "peers": 2}


class AgentConnections:
    """A driver's two connections to the agent, kept here for it."""

    def __init__(self, path: str, run: str, lease: int, beat_s: float, driver: str) -> None:
        self.driver = driver
        self.called = self.beaten = time.monotonic()
        self.ended = False
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._number = 0
        self._size = 0
        self._changed = threading.Condition()
        self._messages = self._connect(path, wire.Attach(wire.WIRE_VERSION, run, lease))
        self._beats = self._connect(path, wire.Attach(wire.WIRE_VERSION, run, lease, beat_s))
        for body in (self._read_messages, self._read_beats):
            threading.Thread(target=body, daemon=True).start()

    def _connect(self, path: str, attach: wire.Attach) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(path)
        sock.sendall(framing.frame(attach))
        return sock

    def _read_messages(self) -> None:
        try:
            while data := self._messages.recv(_READ):
                with self._changed:
                    if self.ended:
                        return
                    self._number += 1
                    self._chunks.append((self._number, data))
                    self._size += len(data)
                    self._changed.notify_all()
                    # With a driver that doesn't keep up, the agent can't send either: it keeps the rest.
                    self._changed.wait_for(lambda: self._size < _FULL or self.ended)
        except OSError:
            pass  # closed by us, or by the agent's death
        self.cut()

    def _read_beats(self) -> None:
        try:
            while self._beats.recv(_READ):
                self.beaten = time.monotonic()
        except OSError:
            pass  # the connection for messages shows it

    def send(self, data: bytes) -> None:
        try:
            self._messages.sendall(data)
        except OSError:
            pass  # the driver learns of it from ``words``

    def take(self, after: int, wait_s: float) -> tuple[int, bytes] | None:
        """What the agent sent after chunk ``after``, which the driver has; None: the agent is gone."""
        with self._changed:
            while self._chunks and self._chunks[0][0] <= after:
                self._size -= len(self._chunks.popleft()[1])
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._chunks) or self.ended, wait_s)
            if not self._chunks:
                return None if self.ended else (after, b"")
            return self._chunks[-1][0], b"".join(data for _, data in self._chunks)

    def cut(self) -> None:
        """Take no more from the agent. What it has sent before can still be read."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def close(self) -> None:
        for sock in (self._messages, self._beats):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other side was quicker
            sock.close()


@ray.remote(concurrency_groups=CONCURRENCY_GROUPS)
class HostActor:
    def __init__(self, host: str, folder_name: str, lock_name: str) -> None:
        folder = runtime_folder() / folder_name
        lock = runtime_folder() / lock_name
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder: Path = folder
        self._sessions: dict[int, AgentConnections] = {}
        self._last_session = 0
        self._lease = 0
        self._relay = Relay(folder / RELAY_SOCKET)
        me = os.getpid()
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            # Where a training function calls ray.init(address="auto"), it means this cluster.
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            raynode.VARIABLE: ray.get_runtime_context().get_node_id(),
        }
        with open(folder / "agent.log", "ab") as log:
            self._agent = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "everstep.agent",
                    host, str(folder), str(me), str(kernel.start_time(me) or 0), str(lock),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=env,
            )  # fmt: skip
        self._raylet_died = False
        for watch in (self._watch_drivers, self._watch_raylet):
            threading.Thread(target=watch, daemon=True).start()

    def hello(self) -> tuple[int, int, dict[str, list[str]]]:
        """(pid, its start time, accelerators by kind), once the agent listens."""
        deadline = time.monotonic() + START_S
        while not self._listens():
            if self._agent.poll() is not None or time.monotonic() > deadline:
                log = (self._folder / "agent.log").read_text(errors="replace")
                raise RuntimeError(f"the agent did not start:\n{log[-4000:]}")
            time.sleep(0.01)
        me = os.getpid()
        return me, kernel.start_time(me) or 0, ray.get_runtime_context().get_accelerator_ids()

    def _listens(self) -> bool:
        try:
            return (self._folder / "ready").read_text() == str(self._agent.pid)
        except OSError:
            return False

    @ray.method(concurrency_group="orders")  # type: ignore[untyped-decorator]
    def attach(self, run: str, lease: int, beat_s: float, driver: str) -> int:
        """A driver connects. Sessions are numbered; the agent knows which driver it obeys."""
        self._last_session += 1
        self._lease = max(self._lease, lease)
        path = str(self._folder / SOCKET)
        self._sessions[self._last_session] = AgentConnections(path, run, lease, beat_s, driver)
        return self._last_session

    @ray.method(concurrency_group="orders")  # type: ignore[untyped-decorator]
    def order(self, session: int, data: bytes) -> None:
        found = self._sessions.get(session)
        if found is not None:
            found.called = time.monotonic()
            found.send(data)

    @ray.method(concurrency_group="words")  # type: ignore[untyped-decorator]
    def words(self, session: int, after: int, wait_s: float) -> tuple[int, bytes] | str:
        """The agent's messages, and the number of their last chunk; or why there will be no more."""
        found = self._sessions.get(session)
        taken = None
        if found is not None:
            found.called = time.monotonic()
            taken = found.take(after, wait_s)
        if taken is not None:
            return taken
        return RAYLET_DIED if self._raylet_died else AGENT_DIED

    @ray.method(concurrency_group="peers")  # type: ignore[untyped-decorator]
    def read(self, question: bytes) -> bytes:
        """What an agent of another node asks this one's."""
        return ask_agent(self._folder / PEER_SOCKET, question)

    @ray.method(concurrency_group="beats")  # type: ignore[untyped-decorator]
    def beat(self, session: int) -> tuple[float, float]:
        """How long ago the agent's last heartbeat was, and what time it is by the clock of this host."""
        now = time.monotonic()
        found = self._sessions.get(session)
        if found is None:
            return float("inf"), now
        found.called = now
        return now - found.beaten, now

    @ray.method(concurrency_group="orders")  # type: ignore[untyped-decorator]
    def end(self, lease: int) -> bool:
        """End the agent and all that runs under it; the actor is of no use after that. False: the driver was
        replaced, and its order doesn't count.
        """
        if lease < self._lease:
            return False
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        try:
            self._agent.wait(END_S)
        except subprocess.TimeoutExpired:
            kernel.send_signal(self._agent.pid, signal.SIGKILL)
            self._agent.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        return True

    def _watch_raylet(self) -> None:
        """Without its raylet the node is lost, which Ray reports after 15 s. Report it at once, and exit."""
        raylet = os.getppid()
        while os.getppid() == raylet:
            time.sleep(_RAYLET_S)
        self._raylet_died = True
        # The agent ends its workers now. Their deaths aren't reported: one incident has one cause.
        for session in list(self._sessions.values()):
            session.cut()
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        self._agent.wait()
        time.sleep(1.0)  # the answers are on their way
        os._exit(1)

    def _watch_drivers(self) -> None:
        """A driver that died has no socket that breaks: once it is silent, Ray is asked whether
        it has ended.
        """
        while True:
            time.sleep(1.0)
            for number, session in list(self._sessions.items()):
                silent = time.monotonic() - session.called
                if (
                    session.ended
                    or silent > _SILENT_S
                    or (silent > _DOUBT_S and cluster.is_dead(session.driver))
                ):
                    session.close()
                    del self._sessions[number]
