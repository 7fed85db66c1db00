"""What a process doesn't read now is kept for it, within bounds, and nobody waits for it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from everstep.agent import outbox
from everstep.agent.outbox import Outbox


async def read(sock: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        data += await loop.sock_recv(sock, 1 << 16)
    return data


def run(body) -> None:  # type: ignore[no-untyped-def]
    async def go() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            overflows: list[bool] = []
            box = Outbox(ours, lambda: overflows.append(True))
            try:
                await body(box, theirs, overflows)
            finally:
                box.close()

    asyncio.run(go())


def test_frames_that_do_not_fit_come_later_whole_and_in_order() -> None:
    async def body(box: Outbox, theirs: socket.socket, overflows: list[bool]) -> None:
        frames = [bytes([n]) * 300_000 for n in range(10)]
        for frame in frames:
            box.put(frame)
        assert box.waits
        assert await read(theirs, 3_000_000) == b"".join(frames)
        await asyncio.sleep(0)
        assert not box.waits
        assert not overflows

    run(body)


def test_a_frame_takes_the_place_of_those_that_it_makes_pointless_but_not_of_one_half_sent() -> None:
    async def body(box: Outbox, theirs: socket.socket, overflows: list[bool]) -> None:
        begun = b"a" * 1_000_000
        box.put(begun, "committed")
        box.put(b"b", "committed")
        box.put(b"kept")
        box.put(b"c", "committed")
        assert await read(theirs, 1_000_005) == begun + b"kept" + b"c"

    run(body)


def test_at_the_bound_it_says_so_once_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MOST_FRAMES", 5)

    async def body(box: Outbox, theirs: socket.socket, overflows: list[bool]) -> None:
        for _ in range(20):
            box.put(b"x" * 1_000_000)
        assert overflows == [True]

    run(body)
