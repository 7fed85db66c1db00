"""Taking over workers that an earlier driver left behind: what their agents tell, and which are kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec

from everstep.control.deadlines import Deadlines
from everstep.control.events import Adopted, Remains
from everstep.control.snapshots import Copy
from everstep.driver.streams import Key, WorkerStream
from everstep.engine.base import Engine
from everstep.protocol import wire, words
from everstep.topology.slices import HostId, SliceName


class LeftBehind:
    """The inventories of the agents, and what they tell again, kept until it is known what to do with it.

    Workers are kept by replica groups, whole ones; without such groups that means all or none.
    """

    def __init__(self, hosts: list[HostId], last_epoch: int) -> None:
        """``last_epoch``: the last that was begun. Who isn't of it was on the way out."""
        self.hosts = hosts
        self._last_epoch = last_epoch
        self.stopping: set[tuple[HostId, int]] = set()
        """(host, generation) of workers that are being ended."""
        self.outdated = False
        """They run other code than the driver that finds them has."""
        self.lighthouse: tuple[HostId, str] | None = None
        """Who has it, and where it is."""
        self._untold = set(hosts)
        self._held: dict[tuple[int, int], tuple[HostId, wire.Held]] = {}
        self._told: list[tuple[HostId, wire.AnyFromAgent]] = []
        self._broken: set[int] = set()
        """Groups that can't be kept."""
        self._copies: list[Copy] = []
        self._changed = asyncio.Event()

    def hear(self, host: HostId, message: wire.AnyFromAgent) -> None:
        match message:
            case wire.Inventory():
                if message.lighthouse:
                    self.lighthouse = (host, message.lighthouse)
                self._copies += [msgspec.structs.replace(copy, host=host) for copy in message.copies]
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

    def give_up_broken(self, slice_of: Mapping[HostId, SliceName]) -> str:
        """Leave out groups of the newest epoch that can't go on: somebody is missing, or was told to end, or
        had not joined; and those that share a slice with one of them. Says why, if there are any.
        """
        current = self._current()
        if not current:
            return "none is left"
        size, world = current[0][1].spec.member.group_size, current[0][1].spec.member.world_size
        here = {held.spec.member.rank: held for _, held in current}
        streams = self._heard_streams()
        told = {r for r, held in here.items() if held.stopping and not streams[r].returned}
        unfit = {
            "are of an attempt that was over": {*here} if self.epoch < self._last_epoch else set(),
            "are gone": set(range(world)) - here.keys(),
            "had been told to end": told,
            # A group that was still meeting waits for words of a driver that is dead.
            "had not joined yet": {rank for rank, stream in streams.items() if not stream.joined} - told,
        }
        self._broken = {rank // size for ranks in unfit.values() for rank in ranks}
        self._spread_along_slices(slice_of)
        why = [f"ranks {', '.join(map(str, sorted(ranks)))} {what}" for what, ranks in unfit.items() if ranks]
        if self._untold:
            why.append(f"no answer from {', '.join(sorted(self._untold))}")
        return "; ".join(why)

    def _heard_streams(self) -> dict[int, WorkerStream]:
        """By rank, with all that was said."""
        streams = self.streams()
        for _, message in self.messages():
            if isinstance(message, wire.FromWorker):
                stream = streams.get((message.epoch, message.generation, message.rank))
                if stream is not None:
                    said = list(stream.feed(message.data))
                    stream.returned = any(isinstance(word, words.Returned) for word in said)
        return {rank: stream for (_, _, rank), stream in streams.items()}

    def _spread_along_slices(self, slice_of: Mapping[HostId, SliceName]) -> None:
        """A slice that is used in part, or has a host that nobody is on, is started anew as a whole."""
        places = [held.spec.assignment for _, held in self._current()]
        on = Counter(a.host for a in places)
        spoilt = {a.slice for a in places if on[a.host] < a.local_world_size}
        spoilt |= {slice_of[host] for host in self.hosts if host in slice_of and not on[host]}
        while True:
            spoilt |= {a.slice for a in places if a.group_id in self._broken}
            more = {a.group_id for a in places if a.slice in spoilt} - self._broken
            if not more:
                return
            self._broken |= more

    def adopted(self, begun: Mapping[int, int]) -> Adopted:
        """``begun``: the last incarnations that were begun, of groups that were replaced."""
        specs = [held.spec for _, held in self._kept()]
        generations = {**begun, **{spec.assignment.group_id: spec.generation for spec in specs}}
        return Adopted(
            self.epoch,
            tuple(spec.assignment for spec in specs),
            tuple(sorted(generations.items())),
            self.outdated,
            tuple(self._copies),
        )

    def remains(self, slice_of: Mapping[HostId, SliceName]) -> Remains | None:
        """What can be restored from the memory of these hosts although no worker is kept: only if each has
        said what it has, and nobody else's hosts share their slices.
        """
        if self._kept() or self._untold or self.stopping or not self._copies:
            return None
        slices = {slice_of[host] for host in self.hosts if host in slice_of}
        if {host for host, name in slice_of.items() if name in slices} != {*self.hosts}:
            return None
        places = tuple((held.spec.member.rank, host) for host, held in self._current())
        return Remains(tuple(sorted(slices)), places, tuple(self._copies))

    def _kept(self) -> list[tuple[HostId, wire.Held]]:
        return [entry for entry in self._current() if entry[1].spec.assignment.group_id not in self._broken]

    def kept_hosts(self) -> set[HostId]:
        return {host for host, _ in self._kept()}

    def fingerprints(self) -> set[str]:
        """Of the code that they run."""
        return {held.spec.fingerprint for _, held in self._kept()}

    def streams(self) -> dict[Key, WorkerStream]:
        return {
            (held.spec.epoch, held.spec.generation, held.spec.member.rank): WorkerStream(
                held.spec.assignment, held.spec.generation, held.offset, held.state
            )
            for _, held in self._kept()
        }

    def pids(self) -> dict[int, int]:
        return {held.spec.member.rank: held.pid for _, held in self._kept()}

    def broken(self) -> dict[tuple[HostId, int], list[int]]:
        """Ranks of the groups that are left out, by host and generation."""
        found: dict[tuple[HostId, int], list[int]] = {}
        for host, held in self._current():
            if held.spec.assignment.group_id in self._broken:
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


async def ask_agents(
    engine: Engine,
    left: LeftBehind,
    lease: int,
    slices: Callable[[], Mapping[HostId, SliceName]],
    limits: Deadlines,
    say: Callable[[str], None],
) -> None:
    """Ask agents that hold workers of this run what they have, and end what can't be kept. ``slices`` is
    called once they have answered.
    """
    for host in left.hosts:
        engine.claim(host)
    await left.wait(left.told, limits.heartbeat_timeout_s)
    why_not = left.give_up_broken(slices())
    if why_not:
        what = "are ended" if left.broken() else "are missing"
        say(f"workers of an earlier driver {what}: {why_not}")
        for (host, generation), ranks in left.broken().items():
            left.stopping.add((host, generation))
            engine.send(host, wire.Stop(lease, left.epoch, generation, ranks, 0.0))
        await left.wait(left.stopped, limits.kill_s)
    if left.remains(slices()) is None:
        for host in left.hosts:
            if host not in left.kept_hosts():
                engine.unclaim(host)
