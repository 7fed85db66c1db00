"""The Ray engine: whole slices of nodes, each reserved as one placement group with an agent on every node.

Placement groups and actors are detached and named under the run: they outlive the driver, and a later one
finds them. All slices of a reservation are asked for at once; unless all of them come, all are given back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from everstep.agent import wire
from everstep.agent.host import DEFAULT_GRACE_S
from everstep.control.failures import Failure, Kind
from everstep.engine.base import Ask, Sink
from everstep.engine.hearing import Hearing
from everstep.engine.ray import cluster
from everstep.engine.ray.actor import END_S, START_S, HostActor
from everstep.engine.ray.demand import Demand
from everstep.engine.ray.link import HostLink
from everstep.engine.ray.sweeper import Sweeper, name_of
from everstep.topology.discovery import Machine, views
from everstep.topology.slices import HostId, HostView, SliceName, by_slice, whole_slices

_LOOK_S = 0.25
_SUSPECT_S = 20.0
"""How long a node that fell silent is left alone, unless Ray says sooner that it is gone: it takes 15 s."""
_THREADS = 32

Given = TypeVar("Given")


@dataclass
class Held:
    """A slice that is ours, or is about to be."""

    name: SliceName
    group: str
    """The placement group's id."""
    hosts: tuple[HostId, ...]
    slots: tuple[int, ...]
    per_worker: dict[str, float]
    tag: str
    given_back: bool = False
    links: dict[HostId, HostLink] = field(default_factory=dict)

    def holds(self, host: HostId) -> dict[str, float]:
        slots = self.slots[self.hosts.index(host)] if host in self.hosts else 0
        return {name: amount * slots for name, amount in self.per_worker.items()}


class RayEngine:
    """Nodes of the Ray cluster that this process is, or can be, a driver of."""

    shares_machine = False
    sink: Sink
    ask: Ask
    hearing: Hearing

    def __init__(self) -> None:
        cluster.connect()
        self._held: dict[SliceName, Held] = {}
        self._reserving: dict[int, asyncio.Task[None]] = {}
        self._reserved_by: dict[SliceName, int] = {}
        """Which reservation asks for a slice."""
        self._hosts: dict[HostId, HostView] = {}
        self._addresses: dict[HostId, str] = {}
        self._suspects: dict[HostId, float] = {}
        self._drains: dict[HostId, float] = {}
        self._wanted_workers = 0
        self._last_view: tuple[HostView, ...] = ()
        self._failures = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._endings: set[asyncio.Task[None]] = set()
        self._looked = asyncio.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="everstep-ray")

    # ------------------------------------------------------------------ who drives

    def whoami(self) -> str:
        return cluster.driver_name()

    def is_dead(self, driver: str) -> bool:
        return cluster.is_dead(driver)

    # ------------------------------------------------------------------ opening and closing

    async def open(self, sink: Sink, ask: Ask) -> None:
        self.sink, self.ask = sink, ask
        self.hearing = Hearing(ask.deadlines, self._silent)
        self._tag = cluster.tag_of(ask.run)
        self._demand = Demand(self._tag, ask)
        # Before anything is reserved, somebody is there who gives it back.
        self._sweeper = await self._off_loop(self._make_sweeper)
        await self._sweeper.hear.remote(ask.deadlines.orphan_s)
        await self._find_what_is_left()
        await self._look()
        self._tasks = [
            asyncio.create_task(self._keep_looking()),
            asyncio.create_task(self._keep_sweeper()),
            asyncio.create_task(self.hearing.run()),
        ]

    def _make_sweeper(self) -> Any:
        return (
            ray.remote(Sweeper)
            .options(
                name=name_of(self._tag),
                namespace=cluster.NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
            )
            .remote(self._tag, self.ask.deadlines.orphan_s)
        )

    async def _keep_sweeper(self) -> None:
        pause = min(5.0, self.ask.deadlines.orphan_s / 10)
        while True:
            await asyncio.sleep(pause)
            try:
                await self._sweeper.hear.remote(self.ask.deadlines.orphan_s)
            except RayError:
                self._sweeper = await self._off_loop(self._make_sweeper)

    async def close(self, *, keep_hosts: bool) -> None:
        tasks = [*self._tasks, *self._reserving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for held in self._held.values():
            for link in held.links.values():
                self.hearing.forget(link.host)
                link.close()
        if not keep_hosts:
            await asyncio.gather(*(self._end(held) for held in self._held.values()), *self._endings)
            await self._off_loop(self._sweep_all)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _sweep_all(self) -> None:
        deadline = time.monotonic() + END_S
        while not cluster.sweep(self._tag) and time.monotonic() < deadline:
            time.sleep(0.05)

    async def _off_loop(self, work: Callable[..., Given], *args: Any) -> Given:
        """Calls that wait for Ray's control store wait on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    # ------------------------------------------------------------------ what an earlier driver left

    async def _find_what_is_left(self) -> None:
        """Whole slices whose agents answer and hold this run are kept; all else with our tag is removed."""
        names = await self._off_loop(cluster.actors, self._tag)
        reserved = await self._off_loop(cluster.groups, self._tag)
        found: dict[str, dict[HostId, str]] = {}
        for name in names:
            group, _, host = name.rpartition("/")
            found.setdefault(group, {})[host] = name
        for number, record in reserved.items():
            held = self._recall(number, record)
            agents = found.get(record["name"], {})
            if held is None or set(agents) != set(held.hosts) or not await self._reconnect(held, agents):
                await self._off_loop(cluster.remove_group, number)
            else:
                self._held[held.name] = held

    def _recall(self, number: str, record: dict[str, Any]) -> Held | None:
        """A slice, from the record of its placement group."""
        prefix, _, slice_name = record["name"].removeprefix(self._tag).partition("/")
        if not slice_name or prefix == "demand" or record["state"] != "CREATED":
            return None
        per_worker = self._per_worker()
        bundles, nodes = record["bundles"], record["bundles_to_node_id"]
        slots = []
        for i in sorted(bundles):
            needs = [bundles[i].get(name, 0) / amount for name, amount in per_worker.items()]
            slots.append(int(min(needs, default=1)))
        hosts = tuple(nodes[i] for i in sorted(nodes))
        return Held(slice_name, number, hosts, tuple(slots), per_worker, record["name"])

    async def _reconnect(self, held: Held, agents: dict[HostId, str]) -> bool:
        try:
            for host, name in agents.items():
                actor = await self._off_loop(ray.get_actor, name, cluster.NAMESPACE)
                held.links[host] = HostLink(host, held.name, actor, self)
            limit = max(5.0, self.ask.deadlines.heartbeat_timeout_s * 4)
            async with asyncio.timeout(limit):
                await asyncio.gather(*(link.connect(self.ask, self.whoami()) for link in held.links.values()))
        except (RayError, TimeoutError, ValueError):
            for link in held.links.values():
                self.hearing.forget(link.host)
                link.close()
            return False
        return all(link.run == self.ask.run for link in held.links.values())

    def held(self) -> list[HostId]:
        return sorted(host for held in self._held.values() for host in held.links)

    # ------------------------------------------------------------------ finding nodes

    async def _keep_looking(self) -> None:
        while True:
            # Not in step with other runs: two that want the same slices must not try together for ever.
            await asyncio.sleep(_LOOK_S * random.uniform(0.7, 1.3))
            await self._look()

    async def _look(self) -> None:
        def ask_ray() -> Any:
            return cluster.nodes(), cluster.available(), cluster.draining(), cluster.groups(self._tag)

        async with self._looked:
            nodes, available, draining, groups = await self._off_loop(ask_ray)
            self._addresses.update((node.id, node.address) for node in nodes)
            for node in nodes:
                if not node.alive or self._suspects.get(node.id, 0.0) < time.monotonic() - _SUSPECT_S:
                    self._suspects.pop(node.id, None)
            ours = self._ours_by_node(groups)
            machines = [
                self._machine(node, available.get(node.id, {}), ours.get(node.id, {}), node.id in draining)
                for node in nodes
            ]
            self._hosts = {view.id: view for view in views(machines, self.ask.wanted)}
            self._notice(draining)
            for host in self._held_hosts():
                view, link = self._hosts.get(host), self._link(host)
                if link is not None and (view is None or not view.alive):
                    self.lost(link, "its node is dead, says Ray")
            self._tell_view()
            await self._off_loop(self._demand.update, self._workers_short(), nodes, groups)

    def _ours_by_node(self, groups: dict[str, dict[str, Any]]) -> dict[HostId, dict[str, float]]:
        """What this run's own placement groups hold, by node: it is free for us."""
        found: dict[HostId, dict[str, float]] = {}
        for record in groups.values():
            for i, node in record.get("bundles_to_node_id", {}).items():
                holding = found.setdefault(node, {})
                for name, amount in record["bundles"][i].items():
                    holding[name] = holding.get(name, 0) + amount
        return found

    def _machine(
        self, node: cluster.Node, free: dict[str, float], ours: dict[str, float], drains: bool
    ) -> Machine:
        names = {*free, *ours}
        usable = {n: min(node.total.get(n, 0), free.get(n, 0) + ours.get(n, 0)) for n in names}
        held = self._link(node.id) is not None
        alive = node.alive and node.id not in self._suspects
        # Ray starts nothing new on a node that drains.
        return Machine(node.id, node.labels, node.total, {} if drains and not held else usable, alive)

    def _tell_view(self) -> None:
        view = tuple(self._as_reserved(view) for view in self._hosts.values())
        if view != self._last_view:
            self._last_view = view
            self.sink.on_capacity(view)

    def _as_reserved(self, view: HostView) -> HostView:
        """A lone host that we hold has room for what we have reserved there, and no more."""
        held = self._held.get(view.slice)
        if held is None or view.id not in held.links:
            return view
        return msgspec.structs.replace(view, slots=held.slots[held.hosts.index(view.id)], free=True)

    def _held_hosts(self) -> list[HostId]:
        return [host for held in self._held.values() for host in held.links]

    def _link(self, host: HostId) -> HostLink | None:
        return next((held.links[host] for held in self._held.values() if host in held.links), None)

    def _notice(self, draining: dict[HostId, float]) -> None:
        for host in self._held_hosts():
            deadline = draining.get(host)
            if deadline is None or self._drains.get(host) == deadline:
                continue
            self._drains[host] = deadline
            grace = deadline - time.time() if deadline else DEFAULT_GRACE_S
            if grace > -self.ask.deadlines.notice_s:
                self.sink.on_message(host, wire.Noticed(grace))

    # ------------------------------------------------------------------ losing hosts

    def _silent(self, host: HostId, since: float) -> None:
        link = self._link(host)
        if link is not None:
            self._suspects[host] = time.monotonic()
            silence = time.monotonic() - since
            self._forget(link, Kind.HOST_SILENT, since, f"no heartbeat for {silence:.1f} s")

    def lost(self, link: HostLink, why: str) -> None:
        """Its agent is gone, or its node: the node may serve again as soon as Ray says so."""
        self._forget(link, Kind.HOST_LOST, time.monotonic(), why)

    def _forget(self, link: HostLink, kind: Kind, at: float, why: str) -> None:
        held = self._held.get(link.slice)
        if held is None or held.links.get(link.host) is not link:
            return
        self._drop(held, link)
        self._last_view = ()  # it counts as lost until the next look, which says what there is
        self.sink.on_lost(link.host, Failure(kind, at, why, host=link.host))

    def _drop(self, held: Held, link: HostLink) -> None:
        self.hearing.forget(link.host)
        self._drains.pop(link.host, None)
        del held.links[link.host]
        link.close()
        ray.kill(link.actor, no_restart=True)

    def retire(self, host: HostId) -> None:
        """A later agent on that node waits until this one, and all that it started, is gone."""
        link = self._link(host)
        if link is not None:
            self._suspects[host] = time.monotonic()
            self._drop(self._held[link.slice], link)

    # ------------------------------------------------------------------ reserving

    def _per_worker(self) -> dict[str, float]:
        return {name: amount for name, amount in self.ask.wanted.per_worker.items() if amount > 0}

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        task = asyncio.create_task(self._reserve(reservation, slices))
        self._reserving[reservation] = task
        self._reserved_by.update(dict.fromkeys(slices, reservation))

    async def _reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        made: list[Held] = []
        try:
            if self._failures:
                await asyncio.sleep(random.uniform(0, min(5.0, 0.1 * 2**self._failures)))
            # One deadline for the lot is the brain's: it withdraws what takes too long.
            async with asyncio.TaskGroup() as together:
                for name in slices:
                    together.create_task(self._reserve_slice(reservation, name, made))
        except ExceptionGroup as errors:
            known, unknown = errors.split((RayError, TimeoutError, RuntimeError, ValueError))
            if known is None or unknown is not None:
                raise
            self._failures += 1
            await self._give_back(made)
            self._forget_reservation(reservation)
            first = known.exceptions[0]
            text = str(first).strip().splitlines()
            self.sink.on_reservation_failed(reservation, text[-1] if text else type(first).__name__)
        except asyncio.CancelledError:
            self._later(self._give_back(made))
            raise
        else:
            self._failures = 0
            self._forget_reservation(reservation)
            self._held.update({held.name: held for held in made})
            for held in made:
                for link in held.links.values():
                    self.claim(link.host)
            self._tell_view()
            self.sink.on_reserved(reservation)

    def _forget_reservation(self, reservation: int) -> None:
        self._reserving.pop(reservation, None)
        self._reserved_by = {
            name: number for name, number in self._reserved_by.items() if number != reservation
        }

    async def _reserve_slice(self, reservation: int, name: SliceName, made: list[Held]) -> None:
        members = [view for view in by_slice(self._hosts.values()).get(name, []) if view.alive]
        if not members:
            raise RuntimeError(f"slice {name} is gone")
        held = Held(
            name,
            "",
            tuple(view.id for view in members),
            tuple(view.slots for view in members),
            self._per_worker(),
            f"{self._tag}{self.ask.lease}.{reservation}/{name}",
        )
        made.append(held)
        group = await self._off_loop(self._make_group, held)
        await self._granted(group)
        for index, host in enumerate(held.hosts):
            actor = await self._off_loop(self._make_actor, held, group, index)
            held.links[host] = HostLink(host, name, actor, self)
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(link.connect(self.ask, self.whoami()) for link in held.links.values()))

    def _make_group(self, held: Held) -> PlacementGroup:
        self._demand.yield_to(held.hosts)
        group = placement_group(
            [held.holds(host) for host in held.hosts],
            strategy="STRICT_SPREAD",
            name=held.tag,
            lifetime="detached",
            bundle_label_selector=[{cluster.NODE_ID: host} for host in held.hosts],
        )
        held.group = group.id.hex()
        if held.given_back:  # nobody waits for it any more
            cluster.remove_group(held.group)
        return group

    async def _granted(self, group: PlacementGroup) -> None:
        while not await self._off_loop(group.wait, 0.5):
            record = (await self._off_loop(cluster.groups, self._tag)).get(group.id.hex())
            if record is None:
                raise RuntimeError("the placement group was removed")

    def _make_actor(self, held: Held, group: PlacementGroup, index: int) -> Any:
        host = held.hosts[index]
        holds = held.holds(host)
        mine = cluster.tag_of(f"{self.ask.run} {host}").split("/")[1]
        options: dict[str, Any] = {
            "num_cpus": holds.pop("CPU", 0),
            "num_gpus": holds.pop("GPU", 0),
            "memory": holds.pop("memory", None),
            "resources": holds,
        }
        if self.ask.runtime_env:
            options["runtime_env"] = dict(self.ask.runtime_env)
        attempt = cluster.tag_of(f"{held.tag} {host}").split("/")[1]
        remote: Any = HostActor
        return remote.options(
            name=f"{held.tag}/{host}",
            namespace=cluster.NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            **options,
        ).remote(host, f"y{attempt}", f"y{mine}.lock")

    def claim(self, host: HostId) -> None:
        link = self._link(host)
        if link is not None:
            link.send(wire.Claim(self.ask.run, self.ask.lease, self.ask.deadlines.orphan_s, link.owner))

    def unclaim(self, host: HostId) -> None:
        link = self._link(host)
        if link is not None:
            self.release((link.slice,))

    def release(self, slices: tuple[SliceName, ...]) -> None:
        for reservation in {self._reserved_by[name] for name in slices if name in self._reserved_by}:
            task = self._reserving.get(reservation)
            self._forget_reservation(reservation)
            if task is not None:
                task.cancel()
        self._later(self._give_back([self._held.pop(name) for name in slices if name in self._held]))

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _give_back(self, slices: list[Held]) -> None:
        for held in slices:
            held.given_back = True
            for link in held.links.values():
                self.hearing.forget(link.host)
                self._drains.pop(link.host, None)
                link.close()
        await asyncio.gather(*(self._end(held) for held in slices))

    async def _end(self, held: Held) -> None:
        """End what runs in a slice, then give it back. What doesn't answer is ended by Ray."""
        ends = [link.actor.end.remote() for link in held.links.values()]
        if ends:
            try:
                async with asyncio.timeout(END_S):
                    await asyncio.gather(*(_quietly(ref) for ref in ends))
            except TimeoutError:
                pass  # removing the group kills its actors, and that their agents
        held.links.clear()
        if held.group:
            await self._off_loop(cluster.remove_group, held.group)

    # ------------------------------------------------------------------ capacity that isn't there yet

    def request_capacity(self, workers: int) -> None:
        self._wanted_workers = workers

    def _workers_short(self) -> int:
        """How many workers' room is missing, for what was asked."""
        if not self._wanted_workers:
            return 0
        usable = sum(found.slots for found in whole_slices(self._hosts.values()))
        return max(0, self._wanted_workers - usable)

    # ------------------------------------------------------------------ talking to agents

    def heard(self, link: HostLink, message: wire.AnyFromAgent) -> None:
        held = self._held.get(link.slice)
        if held is None or held.links.get(link.host) is not link or isinstance(message, wire.Status):
            return
        self.sink.on_message(link.host, message)

    def send(self, host: HostId, message: wire.AnyToAgent) -> None:
        link = self._link(host)
        if link is not None:
            link.send(message)

    def address(self, host: HostId) -> str:
        return self._addresses[host]

    def devices(self, host: HostId) -> tuple[str, ...]:
        link = self._link(host)
        kind = "TPU" if self.ask.wanted.per_worker.get("TPU") else "GPU"
        return tuple(link.accelerators.get(kind, ())) if link is not None else ()


async def _quietly(ref: Any) -> None:
    try:
        await ref
    except RayError:
        pass  # it is gone already, and that is all that was wanted
