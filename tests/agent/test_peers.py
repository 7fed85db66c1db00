"""Agents that copy snapshots from each other: what is sent, what isn't, and what is refused."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.drivers import Holder
from everstep.agent.memory import Memory
from everstep.agent.peers import PeerLine, Peers
from everstep.agent.sockets import PEER_SOCKET
from everstep.protocol import wire
from everstep.protocol.peer_messages import CHUNK, PeerAddress, Read
from everstep.saved.snapshots import At, Copy
from everstep.snapshots.segments import Slot

RUN = "file:///runs/run"
FAST = 1e12
SHARED, OWN = "state-shared.safetensors", "state-00000.safetensors"


class Heard:
    """The driver, as an agent speaks to it."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[wire.AnyFromAgent] = asyncio.Queue()

    def send(self, message: wire.AnyFromAgent) -> None:
        self.words.put_nowait(message)


class Host:
    """An agent's memory, and its door for others."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.memory = Memory()
        self.heard = Heard()
        holder = Holder()
        holder.connection = self.heard  # type: ignore[assignment]
        self.peers = Peers(folder, holder, self.memory)
        self.peers.run = RUN
        self.source = PeerAddress(str(folder / PEER_SOCKET))
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Host:
        self._server = await self.peers.serve()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.peers.leave()
        self.memory.clear()

    def take(
        self, rank: int, at: At, files: dict[str, bytes], digests: dict[str, bytes] | None = None
    ) -> Slot:
        """A snapshot, as a worker leaves it there."""
        number = self.memory.make(rank, {name: len(data) for name, data in files.items()})
        slot = self.memory.of(rank)[number]
        for name, data in files.items():
            slot.files[name].map()[:] = data
        slot.finish(at, 2, f"rank {rank}".encode(), digests or {name: name.encode() for name in files})
        return slot

    async def copy(self, rank: int, at: At, source: PeerAddress, fraction: float = 1.0) -> wire.SlotCopied:
        self.peers.copy(wire.CopySlot(1, rank, at, source, FAST, fraction))
        word = await self.heard.words.get()
        assert isinstance(word, wire.SlotCopied)
        return word

    async def find(self, rank: int, at: At, files: list[str]) -> Slot | str:
        found: asyncio.Future[Slot | str] = asyncio.get_running_loop().create_future()
        self.peers.find(rank, at, files, lambda slot, why: found.set_result(slot or why))
        return await found


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # short enough for a socket
        yield Path(name)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300.0))


AT = At(1, 4)


def test_what_another_host_has_is_copied_and_listed_with_what_is_here(folder: Path) -> None:
    big = bytes(range(256)) * (CHUNK // 128)

    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            a.take(0, AT, {OWN: big})
            word = await b.copy(0, AT, a.source)
            assert (word.rank, word.at, word.reason) == (0, AT, "")
            assert b.memory.copies() == [Copy(0, "", 1, 4, 2)]
            slot = b.memory.find(0, AT)
            assert slot is not None
            assert (slot.files[OWN].map()[:], slot.notes) == (big, b"rank 0")
            b.memory.keep_copies([AT])
            assert b.memory.size == len(big)
            b.memory.keep_copies([At(1, 5)])
            assert b.memory.size == 0

    run(work())


def test_what_is_the_same_on_both_hosts_is_not_sent(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            a.take(0, AT, {SHARED: b"weights", OWN: b"own 0"})
            b.take(1, AT, {SHARED: b"weights"})
            await b.copy(0, AT, a.source)
            slot = b.memory.find(0, AT)
            assert slot is not None
            assert sorted(slot.files) == [OWN]
            assert [copy.rank for copy in b.memory.copies()] == [1, 0]
            found = await b.find(0, AT, [SHARED, OWN])
            assert isinstance(found, Slot)
            assert [found.files[name].map()[:] for name in (SHARED, OWN)] == [b"weights", b"own 0"]

    run(work())


def test_what_is_declared_the_same_and_differs_is_sent(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            a.take(0, AT, {SHARED: b"weights"}, {SHARED: b"one digest"})
            b.take(1, AT, {SHARED: b"WEIGHTS"}, {SHARED: b"another"})
            await b.copy(0, AT, a.source)
            slot = b.memory.find(0, AT)
            assert slot is not None
            assert slot.files[SHARED].map()[:] == b"weights"

    run(work())


def test_the_same_weights_of_another_report_are_sent(folder: Path) -> None:
    """They are about to be written over, while what is copied stays."""

    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            a.take(0, AT, {SHARED: b"weights"})
            b.take(1, At(1, 3), {SHARED: b"weights"})
            await b.copy(0, AT, a.source)
            slot = b.memory.find(0, AT)
            assert slot is not None
            assert list(slot.files) == [SHARED]

    run(work())


def test_a_copy_for_which_there_is_no_memory_is_refused_with_the_numbers(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            a.take(0, AT, {OWN: b"own"})
            word = await b.copy(0, AT, a.source, fraction=1e-12)
            assert word.refused
            assert "MiB needed, and snapshots may have 0 MiB" in word.reason
            assert b.memory.copies() == []

    run(work())


def test_what_is_not_there_any_more_or_belongs_to_another_run_is_not_had(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            slot = a.take(0, AT, {OWN: b"own"})
            assert "is not there" in (await b.copy(0, At(1, 9), a.source)).reason
            slot.clear()
            assert "is not there" in (await b.copy(0, AT, a.source)).reason
            a.take(0, AT, {OWN: b"own"})
            a.peers.run = "file:///runs/another"
            assert "is not there" in (await b.copy(0, AT, a.source)).reason
            nobody = PeerAddress(str(folder / "nobody"))
            assert (await b.copy(0, AT, nobody)).reason.startswith("FileNotFoundError")
            assert b.memory.copies() == []

    run(work())


def test_a_file_of_a_snapshot_that_is_being_written_over_is_not_had(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a:
            slot = a.take(0, AT, {OWN: b"own"})
            line = await PeerLine.connect(a.source.address)
            assert await line.read(Read("", RUN, 0, AT, OWN, 0, 3)) == b"own"
            slot.clear()
            with pytest.raises(Exception, match="is not there"):
                await line.read(Read("", RUN, 0, AT, OWN, 0, 3))
            line.close()

    run(work())


def test_a_worker_gets_only_the_files_that_it_asks_for_from_whoever_has_them(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            a.take(0, AT, {OWN: b"own", "more": b"m" * 100})
            b.peers.sources = {0: [PeerAddress(str(folder / "nobody")), a.source]}
            index = await b.find(0, AT, [])
            assert isinstance(index, Slot)
            assert index.notes == b"rank 0"
            found = await b.find(0, AT, [OWN])
            assert isinstance(found, Slot)
            assert found.files[OWN].map()[:] == b"own"
            assert sorted(found.files) == [OWN]
            assert b.memory.copies() == [], "it is kept only until it is restored"
            b.peers.restored()
            a.memory.clear()
            assert "can't be had from another host" in str(await b.find(0, AT, []))
            assert await b.find(1, AT, []) == "is not there"

    run(work())


def test_ranks_that_have_moved_away_leave_what_is_still_needed(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a:
            a.take(0, AT, {OWN: b"own"})
            a.take(0, At(1, 3), {OWN: b"old"})
            a.memory.retain({1}, [AT])
            assert a.memory.copies() == [Copy(0, "", 1, 4, 2)]
            assert a.memory.of(0) == {}

    run(work())


def test_notes_that_are_damaged_say_nothing_of_files_and_end_no_agent(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            slot = a.take(0, AT, {SHARED: b"weights", OWN: b"own 0"})
            memory = mmap.mmap(slot.fds[0], 0)
            memory[memory.find(b"rank 0") + len(b"rank 0")] ^= 255  # how many files there are
            assert a.memory.copies() == [], "nothing says for certain whose copy it is"
            assert await a.find(0, AT, [OWN]) == "is not there"
            assert "is not what was put there" in (await b.copy(0, AT, a.source)).reason

    run(work())


def test_what_was_fetched_takes_no_memory_once_its_worker_has_it(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            a.take(0, AT, {OWN: b"own 0"})
            b.peers.sources = {0: [a.source]}
            found = await b.find(0, AT, [OWN])
            assert isinstance(found, Slot)
            b.peers.restored()
            with pytest.raises(OSError, match="Bad file descriptor"):
                _ = found.files[OWN].size

    run(work())


def test_what_one_worker_is_being_given_stays_when_another_has_all_it_wanted(folder: Path) -> None:
    async def work() -> None:
        async with Host(folder / "a") as a, Host(folder / "b") as b:
            a.take(0, AT, {SHARED: b"weights", OWN: b"own 0" * CHUNK})
            b.peers.sources = {0: [a.source]}
            assert isinstance(await b.find(0, AT, [SHARED]), Slot)
            rest = asyncio.create_task(b.find(0, AT, [OWN]))
            for _ in range(5):  # it is being sent
                await asyncio.sleep(0)
            b.peers.restored()
            assert isinstance(await rest, Slot)
            found = await b.find(0, AT, [SHARED, OWN])
            assert isinstance(found, Slot)
            assert found.files[SHARED].map()[:] == b"weights"

    run(work())
