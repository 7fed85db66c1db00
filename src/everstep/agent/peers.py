"""Snapshots of other hosts: copies that are kept here for them, and what workers here restore from them.

Agents ask each other for what they need, in the background. Before and after reading it is checked that the
slot still holds the snapshot that was asked for. A worker that restores it checks its digests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from everstep.agent.drivers import Holder
from everstep.agent.memory import Memory, shortage
from everstep.agent.sockets import PEER_SOCKET, RELAY_SOCKET
from everstep.protocol import framing, peer_messages, wire
from everstep.protocol.peer_messages import CHUNK, Data, PeerAddress, Read
from everstep.saved.snapshots import At
from everstep.snapshots.segments import FileContent, Segment, Slot, SlotRecord

_ANSWER_S = 30.0
"""How long an agent may take for one answer."""


class MissingError(Exception):
    """Another agent doesn't have what it was asked for."""


class NoRoomError(Exception):
    """There is no memory for a copy."""


class PeerLine:
    """A connection to another agent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, path: str) -> PeerLine:
        async with asyncio.timeout(_ANSWER_S):
            return cls(*await asyncio.open_unix_connection(path, limit=2 * CHUNK))

    async def read(self, request: Read) -> bytes:
        async with asyncio.timeout(_ANSWER_S):
            self._writer.write(framing.frame(request))
            await self._writer.drain()
            answer: Data = peer_messages.data.decode(await read_frame(self._reader))
        if answer.missing:
            raise MissingError(answer.missing)
        return answer.data

    def close(self) -> None:
        self._writer.close()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))


class Peers:
    """Used from the agent's main thread only."""

    def __init__(self, folder: Path, holder: Holder, memory: Memory) -> None:
        self._folder = folder
        self._holder = holder
        self._memory = memory
        self.run = ""
        """The run that holds this host: agents of other runs get no answer."""
        self.sources: dict[int, list[PeerAddress]] = {}
        """Which hosts have what workers here restore, by rank."""
        self._fetched: dict[tuple[int, At], Slot] = {}
        """What they have asked for, until they have it."""
        self._fetching = asyncio.Lock()
        self._copying = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self) -> None:
        """The run has left this host."""
        self.run, self.sources = "", {}
        for task in self._tasks:
            task.cancel()
        self._close_fetched()

    # ------------------------------------------------------------------ answering others

    async def serve(self) -> asyncio.Server:
        path = self._folder / PEER_SOCKET
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, str(path), limit=2 * CHUNK)
        os.chmod(path, 0o600)
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = peer_messages.read.decode(await read_frame(reader))
                writer.write(framing.frame(self._answer(request)))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it has all that it wanted, or is gone
        finally:
            writer.close()

    def _answer(self, request: Read) -> Data:
        slot = self._memory.find(request.rank, request.at) if request.run == self.run else None
        record = slot.record if slot is not None else None
        if slot is None or record is None or record.label.at != request.at:
            return Data(b"", "is not there")
        if not request.file:
            return Data(record.data)
        content = record.contents.get(request.file)
        owner = self._memory.same(slot, request.at, request.file, content) if content is not None else None
        if owner is None:
            return Data(b"", f"has no {request.file}")
        data = os.pread(owner.files[request.file].fd, request.size, request.offset)
        label = owner.label
        if label is None or label.at != request.at:
            return Data(b"", "was written over")
        return Data(data)

    # ------------------------------------------------------------------ copies for others

    def copy(self, order: wire.CopySlot) -> None:
        """Have a copy here, in the background; ``wire.SlotCopied`` follows."""
        self._begin(self._copy(order))

    async def _copy(self, order: wire.CopySlot) -> None:
        async with self._copying:
            began = time.monotonic()
            reason, refused = "", False
            try:
                if self._memory.find(order.rank, order.at) is None:
                    slot = await self._fetch(order.source, order.rank, order.at, None, order)
                    self._memory.add_copy(order.rank, order.at, slot)
            except NoRoomError as error:
                reason, refused = str(error), True
            except (MissingError, OSError, EOFError, TimeoutError) as error:
                reason = framing.described(error)
            seconds = time.monotonic() - began
            self._holder.send(wire.SlotCopied(order.rank, order.at, seconds, reason, refused))

    async def _fetch(
        self,
        source: PeerAddress,
        rank: int,
        at: At,
        names: Sequence[str] | None,
        order: wire.CopySlot | None,
        known: Slot | None = None,
    ) -> Slot:
        """A slot with these files, or with all that aren't here. ``order``: within what it allows."""
        line = await PeerLine.connect(source.address or str(self._folder / RELAY_SOCKET))
        slot = known
        try:
            question = Read(source.route, self.run, rank, at)
            record = SlotRecord.of(await line.read(question))
            if record is None or not record.is_sound or record.label.at != at:
                raise MissingError("is not what was put there")
            slot = slot or Slot.copied(f"rank-{rank}", record)
            for name, content in record.contents.items():
                wanted = name in names if names is not None else True
                if wanted and self._memory.same(slot, at, name, content) is None:
                    slot.files[name] = await self._fetch_file(line, question, name, content, order)
        except BaseException:
            if slot is not None and slot is not known:
                slot.close()
            raise
        finally:
            line.close()
        return slot

    async def _fetch_file(
        self, line: PeerLine, of: Read, name: str, content: FileContent, order: wire.CopySlot | None
    ) -> Segment:
        if order is not None and (why_not := shortage(content.size, self._memory, order.fraction)):
            raise NoRoomError(why_not)
        segment = Segment.create(f"rank-{of.rank}-{name}", content.size)
        try:
            for offset in range(0, content.size, CHUNK):
                began = time.monotonic()
                size = min(CHUNK, content.size - offset)
                data = await line.read(Read(of.route, of.run, of.rank, of.at, name, offset, size))
                if os.pwrite(segment.fd, data, offset) != size:
                    raise MissingError(f"has only a part of {name}")
                if order is not None:
                    await asyncio.sleep(max(0.0, size / order.rate - (time.monotonic() - began)))
        except BaseException:
            segment.close()
            raise
        return segment

    # ------------------------------------------------------------------ what workers here restore

    def find(self, rank: int, at: At, files: list[str], answer: Callable[[Slot | None, str], None]) -> None:
        self._begin(self._find(rank, at, files, answer))

    async def _find(
        self, rank: int, at: At, files: list[str], answer: Callable[[Slot | None, str], None]
    ) -> None:
        why_not = "is not there"
        async with self._fetching:
            found = self._here(rank, at, files)
            for source in self.sources.get(rank, ()) if found is None else ():
                known = self._fetched.get((rank, at))
                try:
                    slot = await self._fetch(source, rank, at, files, None, known)
                except (MissingError, OSError, EOFError, TimeoutError) as error:
                    why_not = f"can't be had from another host: {framing.described(error)}"
                    continue
                self._fetched[rank, at] = slot
                found = self._here(rank, at, files)
                break
        answer(found, why_not)

    def _here(self, rank: int, at: At, names: list[str]) -> Slot | None:
        """With these files; None: not all of it is here."""
        slot = self._memory.find(rank, at) or self._fetched.get((rank, at))
        record = slot.record if slot is not None else None
        if slot is None or record is None:
            return None
        files = {}
        for name in names:
            content = record.contents.get(name)
            owner = self._memory.same(slot, at, name, content) if content is not None else None
            if owner is None:
                return None
            files[name] = owner.files[name]
        return slot.with_files(files)

    def restored(self) -> None:
        """A worker has all that it wanted, and needs the memory. What is being fetched for others is theirs
        first.
        """
        if self._fetching.locked():
            self._begin(self._forget_fetched())
        else:
            self._close_fetched()

    async def _forget_fetched(self) -> None:
        async with self._fetching:
            self._close_fetched()

    def _close_fetched(self) -> None:
        for slot in self._fetched.values():
            slot.close()
        self._fetched = {}
