"""A worker's slots in its agent's memory, and the agent that writes them to storage."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from everstep.agent.memory import PACKETS, Memory, MemoryLine, WorkersMemory, shortage
from everstep.saved.snapshots import At
from everstep.snapshots.segments import Slot
from everstep.storage.checkpoints import Share

LIMIT_S = 30.0
SHARE = Share("checkpoint_0001_000001", 0, 1, 1, metrics=b"m" * (1 << 20))
SIZES = {"state": 1 << 16}


class NoPeers:
    """The only host."""

    def find(self, rank: int, at: At, files: list[str], answer: Callable[[Slot | None, str], None]) -> None:
        answer(None, "is not there")

    def restored(self) -> None:
        pass


class Agent:
    """A loop with the memory of one host, and lines to workers of rank 0."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory = Memory()
        self.asked: list[tuple[int, Share, bool]] = []
        self.lines: list[MemoryLine] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def worker(self, fraction: float = 0.5) -> WorkersMemory:
        ours, theirs = socket.socketpair(socket.AF_UNIX, PACKETS)
        theirs.settimeout(LIMIT_S)

        def store(number: int, share: Share, held: bool) -> None:
            self.memory.read(0, number)
            self.asked.append((number, share, held))

        self.do(lambda: self.lines.append(MemoryLine(0, ours, self.memory, fraction, store, NoPeers())))
        return WorkersMemory(theirs)

    def do(self, work: object) -> None:
        """On the agent's own thread."""

        async def on_loop() -> None:
            work()  # type: ignore[operator]

        asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(LIMIT_S)

    def finish(self, number: int) -> None:
        """What was to be stored is."""
        self.do(lambda: self.memory.release(self.memory.of(0)[number]))
        for line in self.lines:
            self.do(lambda line=line: line.stored(number))

    def close(self) -> None:
        for line in self.lines:
            self.do(line.close)
        self.do(self.memory.clear)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.close()


def test_slots_outlive_the_worker_that_had_them(agent: Agent) -> None:
    ((number, slot),) = agent.worker().new_slots(SIZES, 1, needed=False)
    slot.files["state"].map()[:4] = b"abcd"
    slot.finish(At(1, 7), 2, b"notes", {"state": b"d" * 32})
    slot.close()
    ((again, found),) = agent.worker().old_slots()
    assert (again, found.notes, found.files["state"].map()[:4]) == (number, b"notes", b"abcd")
    found.close()


def test_a_slot_that_is_being_stored_is_known_as_such_until_it_is(agent: Agent) -> None:
    worker = agent.worker()
    ((number, slot),) = worker.new_slots(SIZES, 1, needed=False)
    worker.store(number, SHARE, held=True)
    assert list(worker.storing()) == [number]
    later = agent.worker()
    later.old_slots()[0][1].close()
    assert list(later.storing()) == [number]
    assert agent.asked == [(number, SHARE, True)]
    agent.finish(number)
    worker.wait()
    assert list(worker.storing()) == []
    later.wait()
    assert list(later.storing()) == []
    slot.close()


def test_a_slot_that_is_dropped_while_it_is_stored_stays_until_then(agent: Agent) -> None:
    worker = agent.worker()
    ((number, slot),) = worker.new_slots(SIZES, 1, needed=False)
    held = agent.memory.of(0)[number]
    agent.do(lambda: agent.memory.read(0, number))
    agent.do(agent.memory.clear)
    assert held.size == 1 << 16
    agent.do(lambda: agent.memory.release(held))
    with pytest.raises(OSError, match="Bad file descriptor"):
        _ = held.size
    slot.close()


def test_all_slots_are_given_or_none_and_why_not_is_told_with_the_numbers(agent: Agent) -> None:
    worker = agent.worker(fraction=0.5)
    assert worker.new_slots({"state": 1 << 40}, 2, needed=False) == []
    assert "2048.0 GiB needed, and snapshots may have" in worker.refused
    assert "(50% of the host's" in worker.refused
    assert agent.memory.of(0) == {}


def test_a_slot_without_which_nothing_can_be_saved_is_given_in_any_case(agent: Agent) -> None:
    worker = agent.worker(fraction=0.0)
    assert worker.new_slots(SIZES, 1, needed=False) == []
    ((_, slot),) = worker.new_slots(SIZES, 1, needed=True)
    slot.close()


def test_memory_that_was_promised_and_is_not_in_use_yet_counts(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.process.kernel.memory", lambda: (50 << 20, 100 << 20))
    assert shortage(30 << 20, agent.memory, 1.0) == ""
    agent.do(lambda: agent.memory.make(0, {"state": 20 << 20}))
    assert "30 MiB needed, and 30 MiB of the host's 100 MiB are free" in shortage(30 << 20, agent.memory, 1.0)
