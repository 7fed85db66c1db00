"""A proxy in front of an HTTP service that breaks what passes through it, as told."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from processes import LIMIT_S


class Fault(Enum):
    """What happens to one request."""

    ERROR = "answered with 500, never done"
    BUSY = "answered with 503, never done"
    FORBIDDEN = "answered with 403, never done"
    RESET = "the connection is reset, and it is never done"
    STALL = "taken, and neither done nor answered"
    LOST = "done, and the connection is reset before the answer"
    LATE = "done, and never answered"
    CUT = "done, and answered by half"


_STATUS = {
    Fault.ERROR: "500 Internal Server Error",
    Fault.BUSY: "503 Slow Down",
    Fault.FORBIDDEN: "403 Forbidden",
}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    size: int


class FaultyProxy:
    """``with FaultyProxy(port) as proxy``. Every request asks ``proxy.judge`` what is to happen to it."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self.judge: Callable[[Request], Fault | None] = lambda request: None
        self.seen: list[Request] = []
        self.done: list[tuple[Request, Fault]] = []
        """The faults that were injected."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other end has gone
        for thread in self._threads:
            thread.join(LIMIT_S)

    # What to do to whom. -----------------------------------------------------------------

    def at_random(self, rate: float, seed: int, *faults: Fault) -> None:
        """Break this share of all requests."""
        draw = random.Random(seed)

        def judge(request: Request) -> Fault | None:
            return draw.choice(faults) if draw.random() < rate else None

        self.judge = judge

    def next(self, method: str, *faults: Fault, containing: str = "") -> None:
        """Break the next requests with this method, one fault each, and let the rest pass."""
        waiting = deque(faults)

        def judge(request: Request) -> Fault | None:
            if waiting and request.method == method and containing in request.path:
                return waiting.popleft()
            return None

        self.judge = judge

    def always(self, fault: Fault | None) -> None:
        self.judge = lambda request: fault

    # The proxy. --------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            with self._lock:
                if self._closing.is_set():
                    client.close()
                    return
                self._open.add(client)
                self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        """One request of one connection: clients make a new one for the next."""
        try:
            self._pass_on(client)
        except OSError:
            pass  # a client that has given up, or we are closing
        finally:
            with self._lock:
                self._open.discard(client)
            client.close()

    def _pass_on(self, client: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            more = client.recv(1 << 16)
            if not more:
                return
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = [line for line in lines[1:] if not line.lower().startswith(("connection:", "expect:"))]
        length = next(
            (int(line.split(":")[1]) for line in headers if line.lower().startswith("content-length:")), 0
        )
        method, path, _ = lines[0].split(" ")
        parts = [body]
        left = length - len(body)
        while left > 0:
            more = client.recv(min(left, 1 << 18))
            if not more:
                return
            parts.append(more)
            left -= len(more)
        request = Request(method, path, length)
        with self._lock:
            self.seen.append(request)
            fault = self.judge(request)
            if fault is not None:
                self.done.append((request, fault))
        if fault in _STATUS:
            answer = [f"HTTP/1.1 {_STATUS[fault]}", "Connection: close", "Content-Length: 0", "", ""]
            client.sendall("\r\n".join(answer).encode())
            return
        if fault is Fault.RESET:
            _reset(client)
            return
        if fault is Fault.STALL:
            self._until_given_up(client)
            return
        data = self._ask("\r\n".join([lines[0], *headers, "Connection: close", "", ""]), parts)
        if fault is Fault.LOST:
            _reset(client)
        elif fault is Fault.LATE:
            self._until_given_up(client)
        elif fault is Fault.CUT:
            client.sendall(data[: len(data) // 2])
            _reset(client)
        else:
            client.sendall(data)

    def _ask(self, head: str, parts: list[bytes]) -> bytes:
        answer = []
        with socket.create_connection(("127.0.0.1", self._upstream)) as upstream:
            upstream.sendall(head.encode("latin-1"))
            for part in parts:
                upstream.sendall(part)
            while more := upstream.recv(1 << 18):
                answer.append(more)
        return b"".join(answer)

    def _until_given_up(self, client: socket.socket) -> None:
        """Say nothing until the other end hangs up."""
        while client.recv(1 << 16):
            pass


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
