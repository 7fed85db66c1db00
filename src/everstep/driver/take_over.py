"""Taking over workers that an earlier driver left behind: agents are asked what they have, and told what is
to end. ``health/survivors.py`` decides who is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import msgspec

from everstep.control.events import Adopted, Remains
from everstep.deadlines import Deadlines
from everstep.driver.streams import WorkerStream
from everstep.engine.base import Engine, waits_for
from everstep.health import survivors
from everstep.health.survivors import LeftWorker, Survivors
from everstep.identity import WorkerId
from everstep.protocol import wire, worker_messages
from everstep.saved.snapshots import Copy
from everstep.topology.slices import HostId, SliceName
from everstep.wording import named


class TakeOver:
    """The inventories of the agents, and what they tell again, kept until it is known what to do with it.

    An agent with much to tell again may be at it still when time is up. Its workers can be kept: the
    inventory says where each worker's words begin, the agent keeps them until they are acknowledged, and they
    come in order over one connection. So what is late is heard like any word that comes after a take-over,
    once. A worker that has joined, or returned after it was told to end, and of which that was not heard in
    time, is ended: nothing is lost but time.
    """

    def __init__(self, hosts: list[HostId], last_epoch: int, begun: Mapping[tuple[int, int], int]) -> None:
        """``last_epoch`` and ``begun``: the last attempt that was begun, and the last incarnations of groups
        that were replaced, by attempt and group.
        """
        self.hosts = hosts
        self._last_epoch = last_epoch
        self._begun = begun
        self.chosen = Survivors()
        """Who is kept, once that is decided."""
        self.stopping: set[tuple[HostId, int, int]] = set()
        """(host, epoch, generation) of workers that are being ended."""
        self.outdated = False
        """They run other code than the driver that finds them has."""
        self.lighthouse: tuple[HostId, str] | None = None
        """Who has it, and where it is."""
        self._untold = set(hosts)
        self._lost: set[HostId] = set()
        """Hosts that have been lost meanwhile."""
        self._listed: set[HostId] = set()
        """Hosts whose inventory has come, though not yet all that they tell again."""
        self._held: dict[tuple[HostId, WorkerId], wire.Held] = {}
        self._told: list[tuple[HostId, wire.AnyFromAgent]] = []
        self._copies: list[Copy] = []
        self._changed = asyncio.Event()

    def hear(self, host: HostId, message: wire.AnyFromAgent) -> None:
        match message:
            case wire.Inventory():
                self._listed.add(host)
                if message.lighthouse:
                    self.lighthouse = (host, message.lighthouse)
                self._copies += [msgspec.structs.replace(copy, host=host) for copy in message.copies]
                for held in message.workers:
                    self._held[host, _worker_id(held.spec)] = held
            case wire.HandedOver():
                self._untold.discard(host)
            case wire.Gone():
                self.stopping.discard((host, message.epoch, message.generation))
            case _:
                self._told.append((host, message))
        self._changed.set()

    def lost(self, host: HostId) -> None:
        self._lost.add(host)
        self.stopping = {which for which in self.stopping if which[0] != host}
        self._changed.set()

    @property
    def awaited(self) -> set[HostId]:
        """Hosts that may still tell what they have."""
        return self._untold - self._lost

    def told(self) -> bool:
        return not self.awaited

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
    def highest_epoch(self) -> int:
        """Of all workers that there are."""
        return max((held.spec.epoch for held in self._held.values()), default=0)

    # ------------------------------------------------------------------ who is kept

    def choose(self) -> None:
        """Decide it, by what has been told so far."""
        self.chosen = survivors.choose(self._left_workers(), self._last_epoch, self._begun, self._untold)

    def _left_workers(self) -> Iterator[LeftWorker]:
        said = {
            WorkerId(message.epoch, message.generation, message.rank): message.data
            for _, message in self.messages()
            if isinstance(message, wire.FromWorker)
        }
        for (host, worker), held in self._held.items():
            stream = _stream(held)
            heard = list(stream.feed(said.get(worker, b"")))
            yield LeftWorker(
                host,
                worker.epoch,
                worker.generation,
                held.spec.assignment,
                stream.joined,
                held.stopping,
                any(isinstance(word, worker_messages.Returned) for word in heard),
            )

    def why_not(self) -> str:
        """Why not all are kept, if they aren't."""
        chosen = self.chosen
        if not chosen.everybody:
            return "none is left"
        why = [f"{named('rank', ranks)} {what.value}" for what, ranks in chosen.unfit]
        silent = [host for host in chosen.unanswered if host not in self._listed]
        if silent:
            why.append(f"no answer from {', '.join(silent)}")
        return "; ".join(why)

    def ended(self) -> dict[tuple[HostId, int, int], list[int]]:
        """Ranks of the workers that are to end, by host, epoch and generation."""
        found: dict[tuple[HostId, int, int], list[int]] = {}
        for worker in (*self.chosen.ended, *self.chosen.superseded):
            found.setdefault((worker.host, worker.epoch, worker.generation), []).append(worker.rank)
        return found

    @property
    def stubborn(self) -> set[HostId]:
        """Hosts whose workers have not ended yet, although they were told to."""
        return {host for host, _, _ in self.stopping}

    # ------------------------------------------------------------------ what the controller is told

    def adopted(self) -> Adopted:
        return Adopted(
            self.chosen.epoch,
            tuple(worker.place for worker in self.chosen.kept),
            self.chosen.generations,
            self.outdated,
            tuple(self._copies),
        )

    def remains(self, slice_of: Mapping[HostId, SliceName]) -> Remains | None:
        """What can be restored from the memory of these hosts although no worker is kept."""
        slices = survivors.slices_to_restore(
            self.chosen,
            {*self.hosts} - self._lost,
            slice_of,
            with_snapshots={copy.host for copy in self._copies},
            still_ending=self.stubborn,
        )
        if not slices:
            return None
        copies = tuple(copy for copy in self._copies if slice_of.get(copy.host) in slices)
        return Remains(slices, copies)

    # ------------------------------------------------------------------ what the driver goes on with

    def _kept(self) -> Iterator[tuple[HostId, WorkerId, wire.Held]]:
        for worker in self.chosen.kept:
            key = WorkerId(worker.epoch, worker.generation, worker.rank)
            yield worker.host, key, self._held[worker.host, key]

    def fingerprints(self) -> set[str]:
        """Of the code that they run."""
        return {held.spec.fingerprint for _, _, held in self._kept()}

    def streams(self) -> dict[WorkerId, WorkerStream]:
        return {key: _stream(held) for _, key, held in self._kept()}

    def pids(self) -> dict[int, int]:
        return {key.rank: held.pid for _, key, held in self._kept()}

    def messages(self) -> Iterator[tuple[HostId, wire.AnyFromAgent]]:
        """What is told again, each rank's words in one piece, and after that how workers ended. Whether a
        host has a template is news only of one that is counted on.
        """
        counted_on = frozenset() if self.outdated else self.chosen.kept_hosts
        data: dict[WorkerId, tuple[HostId, wire.FromWorker]] = {}
        rest: list[tuple[HostId, wire.AnyFromAgent]] = []
        for host, message in self._told:
            if isinstance(message, wire.FromWorker):
                key = WorkerId(message.epoch, message.generation, message.rank)
                before = data[key][1] if key in data else None
                data[key] = (
                    host,
                    wire.FromWorker(*key, before.offset, before.data + message.data) if before else message,
                )
            elif not isinstance(message, wire.Unprepared) or host in counted_on:
                rest.append((host, message))
        yield from data.values()
        yield from rest


def _worker_id(spec: wire.WorkerSpec) -> WorkerId:
    return WorkerId(spec.epoch, spec.generation, spec.member.rank)


def _stream(held: wire.Held) -> WorkerStream:
    return WorkerStream(held.spec.assignment, held.spec.generation, held.offset, held.state)


async def ask_agents(
    engine: Engine,
    left: TakeOver,
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
    await left.wait(left.told, min(limits.heartbeat_timeout_s, limits.take_over_s))
    if not left.told() and limits.take_over_s > limits.heartbeat_timeout_s:
        say(waits_for(left.awaited, limits))
        await left.wait(left.told, limits.take_over_s - limits.heartbeat_timeout_s)
    left.choose()
    why_not = left.why_not()
    if why_not:
        what = "are ended" if left.chosen.ended else "are missing"
        say(f"workers of an earlier driver {what}: {why_not}")
    for (host, epoch, generation), ranks in left.ended().items():
        left.stopping.add((host, epoch, generation))
        engine.send(host, wire.Stop(lease, epoch, generation, ranks, 0.0))
    await left.wait(left.stopped, limits.kill_s)
    there, remains = slices(), left.remains(slices())
    in_memory = remains.slices if remains is not None else ()
    given_up = {host for host in left.hosts if there.get(host) not in in_memory} - left.chosen.kept_hosts
    for host in sorted(given_up):
        engine.unclaim(host)
    for host in sorted(given_up & (left.stubborn | left.awaited)):
        engine.retire(host)
