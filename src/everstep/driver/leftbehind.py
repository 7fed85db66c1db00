"""Workers that an earlier driver left behind: what their agents tell, and whether they can be kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from everstep.agent import wire
from everstep.control.events import Adopted
from everstep.driver.streams import Key, Stream
from everstep.topology.slices import HostId


class LeftBehind:
    """The inventories of the agents, and what they tell again, kept until it is known what to do with it."""

    def __init__(self, hosts: list[HostId]) -> None:
        self.hosts = hosts
        self.stopping: set[tuple[HostId, int]] = set()
        """(host, generation) of workers that are being ended."""
        self.outdated = False
        """They run other code than the driver that finds them has."""
        self.lighthouse: tuple[HostId, str] | None = None
        """Who has it, and where it is."""
        self._untold = set(hosts)
        self._held: dict[tuple[int, int], tuple[HostId, wire.Held]] = {}
        self._told: list[tuple[HostId, wire.AnyFromAgent]] = []
        self._changed = asyncio.Event()

    def hear(self, host: HostId, message: wire.AnyFromAgent) -> None:
        match message:
            case wire.Inventory():
                if message.lighthouse:
                    self.lighthouse = (host, message.lighthouse)
                for held in message.workers:
                    key = (held.spec.epoch, held.spec.member.rank)
                    known = self._held.get(key)
                    if known is None or known[1].spec.generation <= held.spec.generation:
                        self._held[key] = (host, held)
            case wire.HandedOver():
                self._untold.discard(host)
            case wire.Gone():
                self.stopping.discard((host, message.generation))
            case _:
                self._told.append((host, message))
        self._changed.set()

    def told(self) -> bool:
        return not self._untold

    def stopped(self) -> bool:
        return not self.stopping

    async def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Until it holds, or time is up: who hasn't answered by then isn't counted on."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    @property
    def epoch(self) -> int:
        return max((epoch for epoch, _ in self._held), default=0)

    def _current(self) -> list[tuple[HostId, wire.Held]]:
        return [entry for (epoch, _), entry in sorted(self._held.items()) if epoch == self.epoch]

    def why_not_whole(self) -> str:
        """Nothing, if every rank of the newest epoch is here; else what is missing."""
        if self._untold:
            return f"no answer from {', '.join(sorted(self._untold))}"
        current = self._current()
        if not current:
            return "none is left"
        world = current[0][1].spec.member.world_size
        missing = sorted(set(range(world)) - {held.spec.member.rank for _, held in current})
        if missing:
            return f"ranks {', '.join(map(str, missing))} are gone"
        # A group that was still meeting waits for words of a driver that is dead.
        streams = self.streams()
        for _, message in self.messages():
            if isinstance(message, wire.FromWorker):
                stream = streams.get((message.epoch, message.generation, message.rank))
                if stream is not None:
                    words = list(stream.feed(message.data))
                    stream.returned = any(isinstance(word, wire.Returned) for word in words)
        told = {held.spec.member.rank for _, held in current if held.stopping}
        ending = sorted(rank for (_, _, rank), s in streams.items() if rank in told and not s.returned)
        if ending:
            return f"ranks {', '.join(map(str, ending))} had been told to end"
        waiting = sorted(key[2] for key, stream in streams.items() if not stream.joined)
        return f"ranks {', '.join(map(str, waiting))} had not joined yet" if waiting else ""

    def adopted(self) -> Adopted:
        current = [held.spec for _, held in self._current()]
        generations = {spec.assignment.group_id: spec.generation for spec in current}
        return Adopted(
            self.epoch,
            tuple(spec.assignment for spec in current),
            tuple(sorted(generations.items())),
            self.outdated,
        )

    def fingerprints(self) -> set[str]:
        """Of the code that they run."""
        return {held.spec.fingerprint for _, held in self._current()}

    def streams(self) -> dict[Key, Stream]:
        return {
            (held.spec.epoch, held.spec.generation, held.spec.member.rank): Stream(
                held.spec.assignment, held.spec.generation, held.offset, held.state
            )
            for _, held in self._current()
        }

    def pids(self) -> dict[int, int]:
        return {held.spec.member.rank: held.pid for _, held in self._current()}

    def running(self) -> dict[tuple[HostId, int], list[int]]:
        """Ranks by host and generation."""
        found: dict[tuple[HostId, int], list[int]] = {}
        for host, held in self._current():
            found.setdefault((host, held.spec.generation), []).append(held.spec.member.rank)
        return found

    def messages(self) -> Iterator[tuple[HostId, wire.AnyFromAgent]]:
        """What is told again, each rank's words in one piece, and after that how workers ended."""
        data: dict[Key, tuple[HostId, wire.FromWorker]] = {}
        rest: list[tuple[HostId, wire.AnyFromAgent]] = []
        for host, message in self._told:
            if isinstance(message, wire.FromWorker):
                key = (message.epoch, message.generation, message.rank)
                before = data[key][1] if key in data else None
                data[key] = (
                    host,
                    wire.FromWorker(*key, before.offset, before.data + message.data) if before else message,
                )
            else:
                rest.append((host, message))
        yield from data.values()
        yield from rest
