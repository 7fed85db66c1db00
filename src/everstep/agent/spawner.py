"""Starting worker processes: forked from a warm template, or as fresh processes where forking isn't safe.

Used from the agent's main thread only: ``PR_SET_PDEATHSIG`` follows the thread that starts a process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from everstep.agent.outbox import Outbox
from everstep.process import kernel
from everstep.protocol import framing, template_messages, wire


@dataclass(frozen=True)
class Recipe:
    """What a template is made from. Another recipe needs another template."""

    load: template_messages.Load
    env: dict[str, str]
    cwd: str


class TemplateProcess:
    """A template process, as its agent sees it."""

    def __init__(
        self, recipe: Recipe, on_message: Callable[[TemplateProcess, template_messages.AnyMessage], None]
    ) -> None:
        self.recipe = recipe
        self._on_message = on_message
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock = ours
        self._frames = framing.Frames()
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
        self._outbox = Outbox(ours, self.kill)
        self._outbox.put(framing.frame(recipe.load))
        asyncio.get_running_loop().add_reader(ours, self._read)

    def fork(
        self, spec: wire.WorkerSpec, sock: int, memory: int, output: tuple[int, int], progress: int
    ) -> None:
        """Start a worker with these descriptors, which are ours no longer."""
        self._outbox.put(framing.frame(template_messages.Fork(spec)), fds=(sock, memory, *output, progress))

    def end(self, pid: int, sig: int) -> None:
        """Signal a worker. The template does it: it knows whether the worker has ended by itself already."""
        if self._closed:
            kernel.send_signal(pid, sig)
        else:
            self._outbox.put(framing.frame(template_messages.End(pid, sig)))

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._sock)
            return
        for body in self._frames.feed(data):
            self._on_message(self, template_messages.message.decode(body))

    def drain(self) -> None:
        """Read what it sent before it died."""
        try:
            while data := self._sock.recv(1 << 16):
                for body in self._frames.feed(data):
                    self._on_message(self, template_messages.message.decode(body))
        except (BlockingIOError, ConnectionError):
            pass

    def close(self) -> None:
        """Our end of the socket closes: it ends its workers' process trees, and then itself."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._sock)
        self._outbox.close()
        self._sock.close()

    def kill(self) -> None:
        kernel.send_signal(self.pid, signal.SIGKILL)
