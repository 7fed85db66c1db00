"""The socket between an agent and one of its workers.

Messages from the worker go through the spool, and to the driver. They are read only while there is room for
them: else the worker waits in ``report()`` until a driver has acknowledged some, or the disk has space again.
Messages to the worker are queued while the worker doesn't read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from everstep.agent.drivers import Connection, Holder
from everstep.agent.outbox import Outbox
from everstep.agent.spool import Spool
from everstep.protocol import wire, worker_messages

_READ = 1 << 18
_DISK_RETRY_S = 0.5


class WorkerLine:
    """Used from the agent's main thread only. ``overflowed`` is called if the worker leaves so much unread
    that no more can be kept for it.
    """

    def __init__(
        self, spec: wire.WorkerSpec, sock: socket.socket, holder: Holder, overflowed: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._sock = sock
        self._holder = holder
        self._outbox = Outbox(sock, overflowed)
        self.spool = Spool(Path(f"{spec.log_path}.spool"))
        self.state = b""
        """The driver's summary of all that the spool no longer holds."""
        self._reading = False
        self._over = False
        self._disk_timer: asyncio.TimerHandle | None = None
        self.adjust()

    @property
    def is_read(self) -> bool:
        """Whether a driver gets what the worker sends. Otherwise the worker may have to wait in
        ``report()``.
        """
        return self._reading and self._holder.connection is not None

    # ------------------------------------------------------------------ from the worker

    def adjust(self) -> None:
        """Begin or cease to read, as room and driver allow."""
        wanted = not self._over and self._holder.keeps_up and not self.spool.full
        if wanted and not self._reading:
            self._loop.add_reader(self._sock, self._read)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._sock)
        self._reading = wanted
        if self.spool.waits_for_disk and self._disk_timer is None:
            self._disk_timer = self._loop.call_later(_DISK_RETRY_S, self._try_disk)

    def _try_disk(self) -> None:
        self._disk_timer = None
        self.spool.make_room()
        self.adjust()

    def _read(self) -> bool:
        """Pass on what the worker sent. True if there may be more."""
        try:
            data = self._sock.recv(_READ)
        except (BlockingIOError, ConnectionError):
            return False
        if not data:
            self._over = True
            self.adjust()
            return False
        offset = self.spool.end
        self.spool.append(data)
        self._holder.send(self._passed_on(offset, data))
        self.adjust()
        return True

    def _passed_on(self, offset: int, data: bytes) -> wire.FromWorker:
        spec = self._spec
        return wire.FromWorker(spec.epoch, spec.generation, spec.member.rank, offset, data)

    def acknowledge(self, offset: int, state: bytes) -> None:
        self.spool.acknowledge(offset)
        self.state = state
        self.adjust()

    def repeat_to(self, connection: Connection) -> None:
        """Send a later driver everything that no driver has acknowledged."""
        for offset, data in self.spool.chunks():
            connection.send(self._passed_on(offset, data))

    # ------------------------------------------------------------------ to the worker

    def send(self, body: bytes) -> None:
        replaces = ""
        if self._outbox.waits and isinstance(
            worker_messages.to_worker.decode(body[4:]), worker_messages.CheckpointSettled
        ):
            replaces = "committed"  # each of them covers all earlier ones
        self._outbox.put(body, replaces)

    # ------------------------------------------------------------------ the end

    def end(self) -> None:
        """The process is gone: read its last messages."""
        while self._read():
            pass
        self._over = True
        self.adjust()
        self._outbox.close()
        self._sock.close()

    def forget(self) -> None:
        """No driver will need its messages again."""
        if self._disk_timer is not None:
            self._disk_timer.cancel()
            self._disk_timer = None
        self.spool.close()
