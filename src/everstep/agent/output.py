"""What a worker prints: into its log, and to the driver's terminal as far as that keeps up; or, a stream that
is redirected, into a file that the worker writes itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from everstep.agent.drivers import Holder
from everstep.agent.logs import WorkerLog, last_lines
from everstep.errors import StorageAccessError
from everstep.protocol import wire
from everstep.protocol.progress import Page
from everstep.storage.folder import make_private

_READ = 1 << 18
_PIPE = 1 << 20
_MOST_WAITING = 1 << 20


@dataclass(frozen=True)
class OutputPipe:
    """A pipe that a worker prints into."""

    out: int
    """Our end."""
    copy: int | None
    """The file of a stream that is teed."""


def open_streams(spec: wire.WorkerSpec, undo: ExitStack) -> tuple[list[OutputPipe], tuple[int, int]]:
    """What we read, and what the worker has as its standard output and standard error: files that are its
    own, or pipes. Streams that have no file share a pipe, so that their lines stay in order.
    """
    sources: list[OutputPipe] = []
    theirs: list[int] = []
    shared: int | None = None
    for file in (spec.stdout, spec.stderr):
        if file is None and shared is not None:
            theirs.append(_closed_by(undo, os.dup(shared)))
        elif file is None:
            out, shared = _pipe(undo)
            sources.append(OutputPipe(out, None))
            theirs.append(shared)
        elif file.tee:
            out, into = _pipe(undo)
            sources.append(OutputPipe(out, _open(file.path, undo)))
            theirs.append(into)
        else:
            theirs.append(_open(file.path, undo))
    return sources, (theirs[0], theirs[1])


def _open(path: str, undo: ExitStack) -> int:
    try:
        make_private(Path(path).parent)
        return _closed_by(undo, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StorageAccessError(
            f"the log file {path} can't be opened: {error.strerror}",
            "Give a --log-dir that every host can write.",
        ) from error


def _closed_by(undo: ExitStack, fd: int) -> int:
    undo.callback(os.close, fd)
    return fd


def _pipe(undo: ExitStack) -> tuple[int, int]:
    """(our end, the worker's): a worker that prints much is rarely kept waiting."""
    out, into = os.pipe()
    _closed_by(undo, out)
    _closed_by(undo, into)
    os.set_blocking(out, False)
    try:
        fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, _PIPE)
    except (OSError, AttributeError):
        pass  # the usual size does, too
    return out, into


class WorkerOutput:
    """A driver that doesn't read must neither hold up the worker nor fill this host's memory: what it can't
    take now is left out, and a line says later how much that was and where to read it.
    """

    def __init__(
        self, spec: wire.WorkerSpec, sources: list[OutputPipe], log: WorkerLog, holder: Holder, page: Page
    ) -> None:
        self.log = log
        self._page = page
        self._spec = spec
        self._sources = sources
        self._holder = holder
        self._not_shown = 0
        self._redirected = {
            name: file.path
            for name, file in (("stdout", spec.stdout), ("stderr", spec.stderr))
            if file is not None and not file.tee
        }
        for name, path in self._redirected.items():
            log.write(f"everstep: {name} is redirected to {path}\n".encode())
        for source in sources:
            asyncio.get_running_loop().add_reader(source.out, self._read, source)

    def _read(self, source: OutputPipe) -> bool:
        """True if there may be more."""
        try:
            data = os.read(source.out, _READ)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(source.out)
            return False
        if source.copy is not None:
            _write(source.copy, data)
        self.log.write(data)
        if self._spec.echo and self._holder.connection is not None:
            self._show(data)
        return True

    def _show(self, data: bytes) -> None:
        if self._holder.backlog > _MOST_WAITING:
            self._not_shown += len(data)
            return
        self.catch_up()
        self._say(data.decode(errors="replace"))

    def catch_up(self) -> None:
        """The driver reads again: say what it was not shown."""
        if self._not_shown:
            left_out, self._not_shown = self._not_shown, 0
            self._say(
                f"\neverstep: {left_out} bytes printed by rank {self._spec.member.rank} are not shown here, "
                f"because this terminal or its driver did not keep up; they are in {self._spec.log_path}\n"
            )

    def _say(self, text: str) -> None:
        self._holder.send(wire.Output(self._spec.member.rank, text, self._page.echoes))

    @property
    def tail(self) -> str:
        """The last lines, also of streams that are redirected."""
        tails = [self.log.tail, *(last_lines(Path(path)) for path in self._redirected.values())]
        return "\n".join(filter(None, tails))

    def close(self) -> None:
        """The process is gone: read what it printed last."""
        for source in self._sources:
            asyncio.get_running_loop().remove_reader(source.out)
            while self._read(source):
                pass
        self.catch_up()
        for source in self._sources:
            os.close(source.out)
            if source.copy is not None:
                os.close(source.copy)
        self.log.close()


def _write(fd: int, data: bytes) -> None:
    try:
        os.write(fd, data)
    except OSError:
        pass  # a full disk must not take the worker along
