"""Frames on their way to a process that may not read them now.

Nothing here waits: what the socket doesn't take is queued, and written when it does. The queue is bounded. A
frame that makes an earlier one pointless takes its place; nothing else is ever left out.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from everstep.protocol import framing

MOST_BYTES = framing.MAX_FRAME + (64 << 20)
"""One frame of any size fits, and many of the usual size."""
MOST_FRAMES = 10_000


@dataclass
class _Pending:
    data: memoryview
    fds: tuple[int, ...] = ()
    replaces: str = ""
    begun: bool = False


class Outbox:
    """Used from the loop's thread only. ``overflowed`` is called once, when the bound is reached; after that
    nothing more is taken.
    """

    def __init__(self, sock: socket.socket, overflowed: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._overflowed = overflowed
        self._queue: deque[_Pending] = deque()
        self._size = 0
        self._closed = False

    @property
    def waits(self) -> bool:
        """Something is queued: the other side doesn't read just now."""
        return bool(self._queue)

    def put(self, frame: bytes, replaces: str = "", fds: tuple[int, ...] = ()) -> None:
        """Send a frame, now or later. It takes the place of those that are queued and have the same
        ``replaces``. Descriptors are the outbox's from here on, which closes them.
        """
        if self._closed:
            _close(fds)
            return
        if replaces:
            self._drop(replaces)
        self._queue.append(_Pending(memoryview(frame), fds, replaces))
        self._size += len(frame)
        if len(self._queue) == 1:
            self._write()
            if self._queue:
                asyncio.get_running_loop().add_writer(self._sock, self._write)
        elif self._size > MOST_BYTES or len(self._queue) > MOST_FRAMES:
            self.close()
            self._overflowed()

    def _drop(self, replaces: str) -> None:
        dropped = [p for p in self._queue if p.replaces == replaces and not p.begun]
        if dropped:
            self._queue = deque(p for p in self._queue if p.replaces != replaces or p.begun)
            self._size -= sum(len(p.data) for p in dropped)

    def _write(self) -> None:
        try:
            while self._queue:
                first = self._queue[0]
                sent = self._send(first)
                self._size -= sent
                first.data = first.data[sent:]
                first.begun = True
                if first.data:
                    continue
                self._queue.popleft()
        except BlockingIOError:
            return
        except OSError:
            # The other side is gone. Its exit, which the kernel reports, is handled in one place only.
            self.close()
            return
        asyncio.get_running_loop().remove_writer(self._sock)

    def _send(self, pending: _Pending) -> int:
        if not pending.fds:
            return self._sock.send(pending.data)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", pending.fds))]
        sent = self._sock.sendmsg([pending.data], rights)
        _close(pending.fds)
        pending.fds = ()
        return sent

    def close(self) -> None:
        """Send nothing more. The socket is its owner's to close."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_writer(self._sock)
        for pending in self._queue:
            _close(pending.fds)
        self._queue.clear()
        self._size = 0


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
