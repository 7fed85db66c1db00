"""A worker's life, from the fork to the exit: environment, rendezvous, the user's function, leaving."""

from __future__ import annotations

import faulthandler
import os
import queue
import random
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import cloudpickle

from everstep.agent import raynode, scratch, script
from everstep.agent.answers import Answers
from everstep.agent.memory import WorkersMemory
from everstep.backend.base import Backend, NoBackend
from everstep.errors import DamagedCheckpointError, LostSnapshotError, TooLargeError
from everstep.health.vitals import Stage
from everstep.process import kernel
from everstep.process.current import enter
from everstep.process.device_lag import DeviceLag
from everstep.protocol import framing, wire, worker_messages
from everstep.protocol.progress import Page, Progress
from everstep.worker import session as sessions

STOPPED = 128 + signal.SIGTERM
COLLECTIVES = ("barrier", "broadcast")
_CALLERS = (__file__, script.__file__, runpy.run_path.__code__.co_filename)
"""Files whose lines lead to the user's, and say nothing of what happened there."""


class SocketLink:
    """A worker's socket to its agent, which passes everything on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self.turn = 0
        """How many collectives of the control plane there were."""
        self._answers = Answers()
        self.rendezvous: queue.SimpleQueue[worker_messages.Rendezvous] = queue.SimpleQueue()
        self.session: sessions.Session | None = None

    def send(self, frame: bytes) -> None:
        with self._sending:
            self._send(frame)

    def _send(self, frame: bytes) -> None:
        try:
            self._sock.sendall(frame)
        except ConnectionError:
            _await_the_end()

    def ask(self, what: str, body: bytes, timeout_s: float | None) -> bytes:
        with self._answers.expected() as question:
            with self._sending:
                turn = 0
                if what in COLLECTIVES:
                    turn = self.turn = self.turn + 1
                self._send(framing.frame(worker_messages.Question(question.seq, what, body, turn)))
            return question.wait(what, timeout_s)

    def listen(self) -> None:
        """The reader thread: what the driver says."""
        frames = framing.Frames()
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                _await_the_end()
            for body in frames.feed(data):
                self._heard(worker_messages.to_worker.decode(body))

    def _heard(self, message: worker_messages.AnyToWorker) -> None:
        match message:
            case worker_messages.Rendezvous():
                self.rendezvous.put(message)
            case worker_messages.Answer():
                self._answers.put(message)
            case worker_messages.CheckpointSettled():
                if self.session is not None:
                    self.session.committed(message.index)
            case worker_messages.Kept():
                if self.session is not None:
                    self.session.kept(message.kept, message.upto)
            case worker_messages.Propose():
                if self.session is not None:
                    calls = self.session.values.proposed(message.number, message.value)
                    self.send(framing.frame(worker_messages.Counted(message.number, calls)))
            case worker_messages.Agree():
                if self.session is not None:
                    self.session.values.agreed(message.number, message.start)
            case worker_messages.Undriven():
                if self.session is not None:
                    self.session.undriven(message.now)


def _await_the_end() -> NoReturn:
    """The agent is gone. The template ends us with all that we started, which it finds by us: so we must not
    go first.
    """
    if not kernel.HAS_DEATH_SIGNALS:
        os._exit(1)
    while True:
        time.sleep(60)


class _Stopping:
    """What SIGTERM means: end the function, or, once it has returned, leave the group."""

    def __init__(self) -> None:
        self.returned = False
        self.asked = threading.Event()

    def handle(self, *_: object) -> None:
        self.asked.set()
        if not self.returned:
            raise SystemExit(STOPPED)


def work(
    spec: wire.WorkerSpec,
    function: Any,
    config: bytes,
    backend: Backend,
    sock_fd: int,
    memory_fd: int,
    out_fd: int,
    err_fd: int,
    progress_fd: int,
) -> int:
    """Be the worker. Returns the process's exit code."""
    os.setsid()
    _redirect_output(out_fd, err_fd)
    faulthandler.enable(file=2)  # a crash in C code leaves Python's stacks in the log
    os.set_inheritable(progress_fd, False)
    progress = Progress(Page(progress_fd))
    sock = socket.socket(fileno=sock_fd)
    link = SocketLink(sock)
    member = spec.member
    _set_environment(backend, spec)
    if node := os.environ.get(raynode.VARIABLE):
        raynode.join_through(node)
    _reseed(backend, spec.seed)
    stopping = _Stopping()
    signal.signal(signal.SIGTERM, stopping.handle)
    session = sessions.Session(spec, link, WorkersMemory(socket.socket(fileno=memory_fd)), progress)
    session.times.hides_waits = not isinstance(backend, NoBackend)
    session.times.has_device = bool(member.device_kind)
    link.session = session
    threading.Thread(target=link.listen, name="everstep-link", daemon=True).start()
    joined = False
    try:
        endpoint = backend.host(member) if member.group_rank == 0 else None
        link.send(framing.frame(worker_messages.Hello(os.getpid(), endpoint)))
        if endpoint is None:
            endpoint = link.rendezvous.get(timeout=spec.start_timeout_s).endpoint
        backend.join(member, endpoint, spec.start_timeout_s)
        joined = True
        progress.keep_ticking(lambda: _collectives(backend, link), DeviceLag().seconds)
        link.send(framing.frame(worker_messages.Joined()))
        enter(session)
        session.begin()
        arguments, datasets = cloudpickle.loads(config)
        session.hand_over(datasets)
        value = _called(function, arguments, stopping)
        session.reporting.finish()
        # The function may have taken SIGTERM for itself; from here on it means that all are done.
        signal.signal(signal.SIGTERM, stopping.handle)
        link.send(
            framing.frame(_returned(value) if member.group_rank == 0 else worker_messages.Returned(None))
        )
    except SystemExit as error:
        if stopping.asked.is_set():
            return STOPPED
        _flush()
        return _exit_code(error)
    except BaseException as error:  # the user's code may raise anything; all of it is reported
        at = time.monotonic()
        text = _traceback(error)
        echo = backend.is_peer_failure(error)
        if echo:
            progress.echo()
        sys.stderr.write(text)
        _flush()
        message = framing.described(error).split("\n")[0]
        final = isinstance(error, TooLargeError)
        lost = spec.snapshot if isinstance(error, LostSnapshotError) else None
        raised = worker_messages.Raised(
            message, framing.clip(text), echo, at, joined, _damaged(error, spec), lost, final
        )
        link.send(framing.frame(raised))
        return 1
    _flush()
    # Others may still train, and need this process: a JAX coordinator lives in it. The agent says when all
    # are done.
    progress.enter(Stage.RETURNED)
    stopping.returned = True
    stopping.asked.wait()
    backend.leave(member)
    _flush()
    return 0


def _called(function: Any, arguments: tuple[Any, ...], stopping: _Stopping) -> Any:
    """What the function returns; nothing if it leaves by ``sys.exit(0)``. A process that it forks, and that
    comes back here, ends as it would at the end of a script: it is not the worker, and has nothing to say for
    it.
    """
    worker = os.getpid()
    value, code = None, 0
    try:
        value = function(*arguments)
    except SystemExit as error:
        if os.getpid() == worker and (stopping.asked.is_set() or error.code not in (None, 0)):
            raise
        code = _exit_code(error)
    except BaseException as error:
        if os.getpid() == worker:
            raise
        code = 1
        sys.stderr.write(_traceback(error))
    if os.getpid() != worker:
        _flush()
        os._exit(code)
    return value


def _traceback(error: BaseException) -> str:
    """From the user's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _CALLERS:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _exit_code(error: SystemExit) -> int:
    """As Python exits with: a text is shown, and is a failure."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _collectives(backend: Backend, link: SocketLink) -> tuple[int, int]:
    """(those that all ranks of the group take part in, those of some of them)."""
    whole, some = backend.collectives()
    return whole + link.turn, some


def _damaged(error: BaseException, spec: wire.WorkerSpec) -> str:
    """The checkpoint that this worker was given to start from, if that is what it could not read."""
    given = spec.checkpoint or ""
    is_it = isinstance(error, DamagedCheckpointError) and error.checkpoint.endswith(f"/{given}")
    return given if is_it else ""


def _returned(value: Any) -> worker_messages.Returned:
    """What the function returned, or why that can't be sent. It has returned in any case."""
    if value is None:
        return worker_messages.Returned(None)
    try:
        data = bytes(cloudpickle.dumps(value))
    except Exception as error:  # cloudpickle raises whatever the object's own code does
        return worker_messages.Returned(None, f"it can't be pickled: {framing.described(error)}")
    if len(data) > framing.MAX_PAYLOAD:
        size, most = framing.as_size(len(data)), framing.as_size(framing.MAX_PAYLOAD)
        return worker_messages.Returned(None, f"it has {size}, and at most {most} can be sent")
    return worker_messages.Returned(data)


def _redirect_output(out_fd: int, err_fd: int) -> None:
    """Everything printed, by Python or by C, goes to what the agent has opened for it."""
    _flush()
    for fd, stream in ((out_fd, 1), (err_fd, 2)):
        os.dup2(fd, stream)
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="replace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="replace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # the function has closed it or set it to None; or the pipe's reader is gone


def _set_environment(backend: Backend, spec: wire.WorkerSpec) -> None:
    kernel.set_environment(backend.environment(spec.member))
    os.environ["EVERSTEP_RUN"] = spec.run_name
    scratch.use(spec.scratch)
    if spec.lighthouse:
        os.environ["TORCHFT_LIGHTHOUSE"] = spec.lighthouse


def _reseed(backend: Backend, seed: int) -> None:
    """A fork starts with its parent's random state: every rank would draw the same numbers."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))
    backend.reseed(seed)
