"""Taking over workers that an earlier driver left behind: agents report what they have, and end the workers
that can't go on. ``health/survivors.py`` decides which are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

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
    """The inventories of the agents, and the messages that they repeat, kept until it is decided who goes on.

    An agent with many messages may not have repeated all of them when time is up. Its workers can be kept:
    the inventory says where each worker's messages begin, the agent keeps them until they are acknowledged,
    and they come in order over one connection. So late ones are received like any message after a take-over,
    once. A worker is ended if the message that it has joined, or that it returned after it was told to end,
    doesn't come in time: nothing is lost but time.
    """

    def __init__(self, hosts: list[HostId], last_epoch: int, begun: Mapping[tuple[int, int], int]) -> None:
        """``last_epoch`` and ``begun``: the last attempt that was begun, and the last incarnations of groups
        that were replaced, by attempt and group.
        """
        self.hosts = hosts
        self._last_epoch = last_epoch
        self._begun = begun
        self.chosen = Survivors()
        """Which workers are kept, once that is decided."""
        self.stopping: set[tuple[HostId, int, int]] = set()
        """(host, epoch, generation) of workers that are being ended."""
        self.outdated = False
        """They run other code than the driver that finds them has."""
        self.lighthouse: tuple[HostId, str] | None = None
        """(host, address), if one of them has it."""
        self.given_up: set[HostId] = set()
        """Hosts of which nothing is kept."""
        self._unreported = set(hosts)
        self._lost: set[HostId] = set()
        """Hosts that have been lost meanwhile."""
        self._listed: set[HostId] = set()
        """Hosts whose inventory has come, though not yet all that they repeat."""
        self._held: dict[tuple[HostId, WorkerId], wire.Held] = {}
        self._repeated: list[tuple[HostId, wire.AnyFromAgent]] = []
        self._copies: dict[HostId, list[Copy]] = {}
        """In the memory of each host, by what it sent last."""
        self._changed = asyncio.Event()

    def received(self, host: HostId, message: wire.AnyFromAgent) -> None:
        match message:
            case wire.Inventory():
                self._listed.add(host)
                if message.lighthouse:
                    self.lighthouse = (host, message.lighthouse)
                self._copies[host] = message.copies
                for held in message.workers:
                    self._held[host, _worker_id(held.spec)] = held
            case wire.HandedOver():
                self._unreported.discard(host)
            case wire.Gone():
                self.stopping.discard((host, message.epoch, message.generation))
                self._copies[host] = message.copies
            case _:
                self._repeated.append((host, message))
        self._changed.set()

    def lost(self, host: HostId) -> None:
        self._lost.add(host)
        self.stopping = {which for which in self.stopping if which[0] != host}
        self._changed.set()

    @property
    def awaited(self) -> set[HostId]:
        """Hosts that may still report what they have."""
        return self._unreported - self._lost

    def all_reported(self) -> bool:
        return not self.awaited

    def stopped(self) -> bool:
        return not self.stopping

    async def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Until it holds, or time is up: hosts that haven't answered by then aren't counted on."""
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
        """Decide it, by what has been reported so far."""
        self.chosen = survivors.choose(self._left_workers(), self._last_epoch, self._begun, self._unreported)

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
                any(isinstance(message, worker_messages.Returned) for message in heard),
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

    # ------------------------------------------------------------------ for the controller

    def adopted(self) -> Adopted:
        return Adopted(
            self.chosen.epoch,
            tuple(worker.place for worker in self.chosen.kept),
            self.chosen.generations,
            self.outdated,
            tuple(self._copies_on(self._copies)),
        )

    def remains(self, slice_of: Mapping[HostId, SliceName]) -> Remains | None:
        """What can be restored from the memory of these hosts although no worker is kept."""
        slices = survivors.slices_to_restore(
            self.chosen,
            {*self.hosts} - self._lost,
            slice_of,
            with_snapshots={host for host, copies in self._copies.items() if copies},
            still_ending=self.stubborn,
        )
        if not slices:
            return None
        held = [host for host in self._copies if slice_of.get(host) in slices]
        return Remains(slices, tuple(self._copies_on(held)))

    def _copies_on(self, hosts: Iterable[HostId]) -> Iterator[Copy]:
        for host in hosts:
            yield from (msgspec.structs.replace(copy, host=host) for copy in self._copies[host])

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
        """The repeated messages: each rank's in one piece, and after that how workers ended. That a host has
        no template matters only for one that is counted on.
        """
        counted_on = frozenset() if self.outdated else self.chosen.kept_hosts
        data: dict[WorkerId, tuple[HostId, wire.FromWorker]] = {}
        rest: list[tuple[HostId, wire.AnyFromAgent]] = []
        for host, message in self._repeated:
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
    await left.wait(left.all_reported, min(limits.heartbeat_timeout_s, limits.take_over_s))
    if not left.all_reported() and limits.take_over_s > limits.heartbeat_timeout_s:
        say(waits_for(left.awaited, limits))
        await left.wait(left.all_reported, limits.take_over_s - limits.heartbeat_timeout_s)
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
    left.given_up = {host for host in left.hosts if there.get(host) not in in_memory} - left.chosen.kept_hosts
    for host in sorted(left.given_up):
        engine.unclaim(host)
    for host in sorted(left.given_up & (left.stubborn | left.awaited)):
        engine.retire(host)
