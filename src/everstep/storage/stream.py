"""Bytes on their way through: read, hashed and handed on at the same time, in a few fixed buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

CHUNK = 4 << 20
BUFFERS = 3


class Readable(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...


def pump(source: Readable, sink: Callable[[memoryview], object], size: int = CHUNK) -> tuple[int, str]:
    """Read everything, give it to ``sink`` piece by piece, and return (size, SHA-256). ``size``: how much is
    expected, so that buffers for a small file are small.

    Hashing has a thread of its own: ``hashlib`` and file I/O both release the interpreter, so on two cores
    the digest is nearly free. A file that fits in one piece is not worth the thread.
    """
    digest = hashlib.sha256()
    length = min(CHUNK, size + 1)
    ring: list[tuple[memoryview, Future[None] | None]] = [(memoryview(bytearray(length)), None)]
    count = _fill(source, ring[0][0])
    if count < length:
        piece = ring[0][0][:count]
        digest.update(piece)
        sink(piece)
        return count, digest.hexdigest()
    ring += [(memoryview(bytearray(length)), None) for _ in range(BUFFERS - 1)]
    total, at = 0, 0
    with ThreadPoolExecutor(1, thread_name_prefix="everstep-digest") as hasher:
        while count:
            buffer = ring[at][0]
            ring[at] = (buffer, hasher.submit(digest.update, buffer[:count]))
            sink(buffer[:count])
            total += count
            at = (at + 1) % BUFFERS
            buffer, hashed = ring[at]
            if hashed is not None:
                hashed.result()
            count = _fill(source, buffer)
    return total, digest.hexdigest()


def _fill(source: Readable, buffer: memoryview) -> int:
    """Read until the buffer is full, or there is no more."""
    count = 0
    while count < len(buffer) and (more := source.readinto(buffer[count:])):
        count += more
    return count
