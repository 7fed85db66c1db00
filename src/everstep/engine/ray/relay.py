"""Questions between agents of different nodes: passed on from actor to actor, by Ray's own calls."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from everstep.engine.ray import cluster
from everstep.protocol import framing, peer_messages
from everstep.protocol.peer_messages import Data

_ANSWER_S = 30.0


class Relay:
    """Listens for the questions of this node's agent. The route of each is the name of an actor."""

    def __init__(self, path: Path) -> None:
        self._actors: dict[str, Any] = {}
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        os.chmod(path, 0o600)
        self._listening.listen()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            sock, _ = self._listening.accept()
            threading.Thread(target=self._pass_on, args=(sock,), daemon=True).start()

    def _pass_on(self, sock: socket.socket) -> None:
        with sock:
            while (question := _receive(sock)) is not None:
                try:
                    sock.sendall(self._ask(question))
                except OSError:
                    return  # the agent is gone

    def _ask(self, question: bytes) -> bytes:
        name = peer_messages.read.decode(question[4:]).route
        try:
            if name not in self._actors:
                self._actors[name] = ray.get_actor(name, namespace=cluster.NAMESPACE)
            return bytes(ray.get(self._actors[name].read.remote(question), timeout=_ANSWER_S))
        except (RayError, ValueError) as error:  # there is no such actor any more
            self._actors.pop(name, None)
            return framing.frame(Data(b"", framing.described(error)))


def ask_agent(path: Path, question: bytes) -> bytes:
    """The answer of this node's agent to the question of another one, as a frame."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_ANSWER_S)
        sock.connect(str(path))
        sock.sendall(question)
        answer = _receive(sock)
    if answer is None:
        raise ConnectionError("the agent did not answer")
    return answer


def _receive(sock: socket.socket) -> bytes | None:
    """A frame, with its length; None: there is no more."""
    try:
        length = _exactly(sock, 4)
        return length + _exactly(sock, int.from_bytes(length, "little"))
    except (EOFError, ConnectionError):
        return None


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(data)
