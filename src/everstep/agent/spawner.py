"""Starting worker processes: forked from a warm template, or as fresh processes where forking isn't safe.

Used from the agent's main thread only: ``PR_SET_PDEATHSIG`` follows the thread that starts a process.
"""

from __future__ import annotations

import array
import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from everstep.agent import kernel, wire


@dataclass(frozen=True)
class Recipe:
    """What a template is made from. Another recipe needs another template."""

    load: wire.Load
    env: dict[str, str]
    cwd: str


class Template:
    """A template process, as its agent sees it."""

    def __init__(self, recipe: Recipe, heard: Callable[[Template, wire.AnyWord], None]) -> None:
        self.recipe = recipe
        self._heard = heard
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock = ours
        self._frames = wire.Frames()
        self._closed = False
        with theirs:
            self.pid = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # where it starts, a user's file may have the name of one of Python's own
                    "-m",
                    "everstep.agent.template",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                env=recipe.env,
                cwd=recipe.cwd,
                stdin=subprocess.DEVNULL,
            ).pid
        ours.setblocking(True)
        self._order(recipe.load)
        asyncio.get_running_loop().add_reader(ours, self._read)

    def _order(self, order: wire.AnyOrder, fds: tuple[int, ...] = ()) -> None:
        data = wire.frame(order)
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self._sock.sendmsg([data], rights)
                data = data[sent:]
            self._sock.sendall(data)
        except (BrokenPipeError, ConnectionError):
            pass  # its death is told by the kernel, which is the one place where we hear of it

    def fork(self, spec: wire.WorkerSpec, sock: int, out: int) -> None:
        self._order(wire.Fork(spec), (sock, out))

    def end(self, pid: int, sig: int) -> None:
        """Signal a worker. Its parent does it, who knows whether it has ended by itself already."""
        if self._closed:
            kernel.send_signal(pid, sig)
        else:
            self._order(wire.End(pid, sig))

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._sock)
            return
        for body in self._frames.feed(data):
            self._heard(self, wire.word.decode(body))

    def drain(self) -> None:
        """Read what it said before it died."""
        self._sock.setblocking(False)
        try:
            while data := self._sock.recv(1 << 16):
                for body in self._frames.feed(data):
                    self._heard(self, wire.word.decode(body))
        except (BlockingIOError, ConnectionError):
            pass

    def close(self) -> None:
        """Our end of the socket closes: it ends its workers' process trees, and then itself."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()

    def kill(self) -> None:
        kernel.send_signal(self.pid, signal.SIGKILL)
