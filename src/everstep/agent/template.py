"""The warm template: it has imported the user's function and framework, and forks workers in milliseconds.

Exec'd by the agent, never forked from it. One thread of ours, no storage, no network. It also guards: when
its agent dies, it ends its workers with their whole process trees, and then itself.

Where forking isn't safe, the same program runs as a fresh process for one worker: it loads, then *becomes*
the worker.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import Any, NoReturn

import cloudpickle

from everstep.agent import threads
from everstep.backend.base import packages_of
from everstep.process import kernel
from everstep.protocol import framing, template_messages, wire
from everstep.protocol.script import set_up_logging

_FDS_PER_FORK = 5


class Template:
    """The loop: orders of the agent in, messages about children out."""

    def __init__(self, sock: socket.socket, agent: int) -> None:
        self._sock = sock
        self._agent = agent
        self._frames = framing.Frames()
        self._fds: list[int] = []
        self._children: dict[int, bool] = {}
        """pid → whether we ended it."""
        self._loaded: tuple[Any, bytes, Any] | None = None
        self._may_fork = True

    def run(self) -> NoReturn:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._agent_died())
        self._wake = (wake_read, wake_write)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if wake_read in ready:
                try:
                    os.read(wake_read, 4096)
                except BlockingIOError:
                    pass
                self._reap()
            if self._sock.fileno() in ready:
                self._read()

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 64)
        except ConnectionError:
            data, fds = b"", []
        self._fds += fds
        if not data:
            self._agent_died()
        for body in self._frames.feed(data):
            match template_messages.order.decode(body):
                case template_messages.Load() as load:
                    self._load(load)
                case template_messages.Fork() as fork:
                    self._fork(fork.spec)
                case template_messages.End() as end:
                    self._end(end)

    def _send(self, message: template_messages.AnyMessage) -> None:
        try:
            self._sock.sendall(framing.frame(message))
        except (BrokenPipeError, ConnectionError):
            self._agent_died()

    def _agent_died(self) -> NoReturn:
        # The socket and a signal both show it: the second one must not interrupt what the first has begun.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kernel.kill_sessions(set(self._children))
        os._exit(0)

    # ------------------------------------------------------------------ loading

    def _load(self, load: template_messages.Load) -> None:
        began = time.monotonic()
        # Imports make millions of objects that stay: collecting garbage among them is a fifth of the time.
        gc.disable()
        sys.path[:] = load.python_path
        # Before the user's modules, which may read it when they are imported.
        sys.argv[:] = load.script.arguments()
        self._may_fork = load.may_fork
        try:
            missing = _import_all(load.preload)
            importlib.import_module("everstep.agent.worker")  # once here, not in every fork
            function, backend = cloudpickle.loads(load.code)
            for package in packages_of(backend):
                if package in missing:
                    raise ImportError(f"{package} can't be imported: {missing[package]}")
            set_up_logging(load.script)
        except BaseException as error:  # whatever the user's module raises when it is imported
            self._send(
                template_messages.LoadFailed(framing.described(error), framing.clip(traceback.format_exc()))
            )
            return
        self._loaded = (function, load.config, backend)
        why_not = ""
        if load.may_fork:
            why_not = self._probe(load.probe_s)
        gc.freeze()
        gc.enable()
        self._send(template_messages.Loaded(load.may_fork and not why_not, why_not, time.monotonic() - began))

    def _probe(self, deadline_s: float) -> str:
        """Whether a fork of this process can run one operation. Returns why not, or nothing."""
        assert self._loaded is not None
        backend = self._loaded[2]
        pid = self._os_fork()
        if pid == 0:
            os.setsid()
            code = 1
            try:
                self._forget_signals()
                kernel.die_with_parent(self._pid)
                backend.probe()
                code = 0
            finally:
                os._exit(code)
        why_not = threads.why_not_fork()
        if why_not:
            kernel.send_signal(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return why_not
        fd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            done = poll.poll(deadline_s * 1000)
        finally:
            os.close(fd)
        if not done:
            kernel.send_signal(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not done:
            return f"a forked process did not finish one operation within {deadline_s:g} s"
        code = os.waitstatus_to_exitcode(status)
        return "" if code == 0 else f"a forked process could not run one operation (exit code {code})"

    def _forget_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _os_fork(self) -> int:
        self._pid = os.getpid()
        with warnings.catch_warnings():
            # JAX and Python ≥ 3.12 warn that forking a process with threads may hang: we look for that
            # ourselves.
            warnings.simplefilter("ignore")
            return os.fork()

    # ------------------------------------------------------------------ workers

    def _fork(self, spec: wire.WorkerSpec) -> None:
        assert self._loaded is not None, "asked for a worker before the function was loaded"
        fds = tuple(self._fds[:_FDS_PER_FORK])
        del self._fds[:_FDS_PER_FORK]
        if not self._may_fork:
            self._send(template_messages.Forked(spec.member.rank, spec.epoch, os.getpid()))
            self._become(spec, fds, parent=self._agent)
        pid = self._os_fork()
        if pid == 0:
            self._become(spec, fds, parent=self._pid)
        for fd in fds:
            os.close(fd)
        self._children[pid] = False
        self._send(template_messages.Forked(spec.member.rank, spec.epoch, pid))

    def _become(self, spec: wire.WorkerSpec, fds: tuple[int, ...], parent: int) -> NoReturn:
        from everstep.agent.worker import work

        assert self._loaded is not None
        code = 1
        try:
            # A fresh process is the agent's child: its exit status is all that the agent needs.
            self._forget_signals()
            kernel.die_with_parent(parent)
            for fd in (*self._wake, self._sock.fileno()):
                os.close(fd)
            self._sock.detach()
            function, config, backend = self._loaded
            code = work(spec, function, config, backend, *fds)
        finally:
            os._exit(code)

    def _end(self, end: template_messages.End) -> None:
        if end.pid not in self._children:
            return
        # If it has already ended by itself, or is about to, that is what its status must say.
        if os.waitid(os.P_PID, end.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) or kernel.is_dying(end.pid):
            return
        self._children[end.pid] = True
        kernel.send_signal(end.pid, end.signal)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._send(
                    template_messages.Ended(pid, status, usage.ru_maxrss * 1024, self._children.pop(pid))
                )


def _import_all(names: list[str]) -> dict[str, ImportError]:
    """Import what can be. The rest is left to the worker that needs it, which fails at the line that does."""
    missing = {}
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing[name] = error
    return missing


def main() -> None:
    fd, agent = int(sys.argv[1]), int(sys.argv[2])
    kernel.die_with_parent(agent, signal.SIGTERM)
    # The signal says that the agent died, also while we are busy importing; our handler ends the workers'
    # process trees first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Template(socket.socket(fileno=fd), agent).run()


if __name__ == "__main__":
    main()
