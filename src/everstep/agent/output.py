"""What a worker prints: into its log, all of it, and to the driver's terminal, as far as that keeps up."""

from __future__ import annotations

import asyncio
import fcntl
import os

from everstep.agent.drivers import Holder
from everstep.agent.logs import WorkerLog
from everstep.protocol import wire

_READ = 1 << 18
_PIPE = 1 << 20
_MOST_WAITING = 1 << 20


def output_pipe() -> tuple[int, int]:
    """(our end, the worker's): a worker that prints much is rarely kept waiting."""
    out, into = os.pipe()
    os.set_blocking(out, False)
    try:
        fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, _PIPE)
    except (OSError, AttributeError):
        pass  # the usual size does, too
    return out, into


class WorkerOutput:
    """A driver that doesn't read must neither hold up the worker nor fill this host's memory: what it can't
    be shown now it is told the size of later, and where to read it.
    """

    def __init__(self, spec: wire.WorkerSpec, out: int, log: WorkerLog, holder: Holder) -> None:
        self.log = log
        self._spec = spec
        self._out = out
        self._holder = holder
        self._not_shown = 0
        asyncio.get_running_loop().add_reader(out, self._read)

    def _read(self) -> bool:
        """True if there may be more."""
        try:
            data = os.read(self._out, _READ)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._out)
            return False
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
        self._holder.say(wire.Output(self._spec.member.rank, text))

    def close(self) -> None:
        """The process is gone: read what it printed last."""
        asyncio.get_running_loop().remove_reader(self._out)
        while self._read():
            pass
        self.catch_up()
        os.close(self._out)
        self.log.close()
