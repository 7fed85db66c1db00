"""Asking for slices, all or none, and giving them back, also after errors."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from everstep.engine.base import EngineRequest, Sink
from everstep.engine.ray import cluster
from everstep.engine.ray.actor import END_S, START_S
from everstep.engine.ray.demand import Demand
from everstep.engine.ray.endings import end_slice
from everstep.engine.ray.held import HeldSlice
from everstep.engine.ray.link import ActorLink, LinkOwner
from everstep.engine.ray.slicegroup import make_actor, make_group
from everstep.engine.ray.upkeep import OffLoop, describe
from everstep.engine.ray.watch import ClusterWatch
from everstep.errors import AgentVersionError
from everstep.topology.slices import SliceName

logger = logging.getLogger("everstep")

_SLOWEST_S = 5.0
"""Between tries to give something back."""

Given = TypeVar("Given")


class NoSuchSliceError(Exception):
    """What was to be reserved is no longer there."""


class ReservationOwner(LinkOwner, Protocol):
    """What reserving needs of the engine."""

    request: EngineRequest
    sink: Sink
    watch: ClusterWatch
    demand: Demand
    off_loop: OffLoop

    def whoami(self) -> str: ...

    def unlink(self, link: ActorLink) -> None: ...

    def reserved(self, reservation: int, slices: list[HeldSlice]) -> None: ...


class Reservations:
    """Reservations that are under way, and slices that are being given back."""

    def __init__(self, engine: ReservationOwner, tag: str) -> None:
        self._engine = engine
        self._tag = tag
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reservation_of: dict[SliceName, int] = {}
        """Which reservation asks for a slice."""
        self._endings: set[asyncio.Task[None]] = set()
        self._failures = 0

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        self._tasks[reservation] = asyncio.create_task(self._reserve(reservation, slices))
        self._reservation_of.update(dict.fromkeys(slices, reservation))

    def withdraw(self, slices: tuple[SliceName, ...]) -> None:
        """These are no longer wanted: neither are those that were asked for together with them."""
        for reservation in {self._reservation_of[name] for name in slices if name in self._reservation_of}:
            task = self._tasks.get(reservation)
            self._forget(reservation)
            if task is not None:
                task.cancel()

    def _forget(self, reservation: int) -> None:
        self._tasks.pop(reservation, None)
        self._reservation_of = {
            name: number for name, number in self._reservation_of.items() if number != reservation
        }

    async def close(self) -> None:
        """Call off what is under way, and wait a while for the end of what is being given back."""
        asked = list(self._tasks.values())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        endings = list(self._endings)
        if endings:
            await asyncio.wait(endings, timeout=2 * END_S)
        for ending in endings:
            ending.cancel()

    # ------------------------------------------------------------------ asking

    async def _reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        made: list[HeldSlice] = []
        try:
            if self._failures:
                await asyncio.sleep(random.uniform(0, min(5.0, 0.1 * 2**self._failures)))
            # One deadline for the lot is the controller's: it withdraws what takes too long.
            async with asyncio.TaskGroup() as together:
                for name in slices:
                    together.create_task(self._reserve_slice(reservation, name, made))
        except ExceptionGroup as errors:
            # Nothing is kept after an error. The cause goes to the controller, which may try again.
            self._failures += 1
            await asyncio.wait({self.give_back(made)}, timeout=END_S)
            self._forget(reservation)
            mismatch = errors.subgroup(AgentVersionError)
            if mismatch is not None:
                self._engine.sink.on_broken(mismatch.exceptions[0])
                return
            self._engine.sink.on_reservation_failed(reservation, _reason(errors))
        except asyncio.CancelledError:
            self.give_back(made)
            raise
        else:
            self._failures = 0
            self._forget(reservation)
            self._engine.reserved(reservation, made)

    async def _reserve_slice(self, reservation: int, name: SliceName, made: list[HeldSlice]) -> None:
        engine = self._engine
        members = engine.watch.members(name)
        if not members:
            raise NoSuchSliceError(f"slice {name} is gone")
        held = HeldSlice(
            name,
            tuple(view.id for view in members),
            tuple(view.slots for view in members),
            per_worker(engine.request),
            f"{self._tag}{engine.request.lease}.{reservation}/{name}",
        )
        made.append(held)
        await self._make(held, engine.demand.yield_to, held.hosts)
        group = await self._make(held, make_group, held)
        await self._granted(group)
        for index, host in enumerate(held.hosts):
            actor = await self._make(held, make_actor, engine.request, held, group, index)
            held.links[host] = ActorLink(host, name, actor, engine)
        async with asyncio.timeout(START_S):
            await asyncio.gather(
                *(link.connect(engine.request, engine.whoami()) for link in held.links.values())
            )

    async def _make(self, held: HeldSlice, work: Callable[..., Given], *args: Any) -> Given:
        held.making = making = self._engine.off_loop(work, *args)
        # The thread goes on when nobody waits any more; what it makes is then given back with the rest.
        return await asyncio.shield(making)

    async def _granted(self, group: PlacementGroup) -> None:
        # Ray takes whole seconds: with less than one, its control store would be asked without a pause.
        while not await self._engine.off_loop(group.wait, 1):
            records = await self._engine.off_loop(cluster.groups, self._tag)
            if group.id.hex() not in records:
                raise NoSuchSliceError("the placement group was removed")

    # ------------------------------------------------------------------ giving back

    def give_back(self, slices: list[HeldSlice]) -> asyncio.Task[None]:
        """End what runs there, and let go of it. That is tried until it is done."""
        for held in slices:
            for link in held.links.values():
                self._engine.unlink(link)
        return self._later(_all(self._end(held) for held in slices))

    def end_later(self, groups: list[str]) -> None:
        """Slices of an earlier driver whose agents don't answer."""
        end = partial(end_slice, self._tag, self._engine.request.lease)
        for group in groups:
            self._later(self._remove(end, group))

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    async def _end(self, held: HeldSlice) -> None:
        """End what runs in a slice, then give it back. What doesn't answer is ended by Ray, unless another
        driver has it by now.
        """
        if held.making is not None:
            await asyncio.wait({held.making})
            if not held.making.cancelled():
                held.making.exception()  # handled already: asyncio need not warn of it
        lease = self._engine.request.lease
        ends = [_is_done(link.actor.end.remote(lease)) for link in held.links.values()]
        try:
            async with asyncio.timeout(END_S):
                have_ended = sum(await asyncio.gather(*ends)) == len(held.hosts)
        except TimeoutError:
            have_ended = False
        held.links.clear()
        end = cluster.remove_named if have_ended else partial(end_slice, self._tag, lease)
        await self._remove(end, held.group_name)

    async def _remove(self, remove: Callable[[str], None], tag: str) -> None:
        """By name: also what was made by a call that didn't return."""
        pause = 0.1
        while True:
            try:
                await self._engine.off_loop(remove, tag)
                return
            except Exception as error:  # Ray's control store is away, in one of the many ways it can be
                if pause == 0.1:
                    self._engine.sink.on_trouble(f"a reservation can't be given back yet ({describe(error)})")
            await asyncio.sleep(pause)
            pause = min(_SLOWEST_S, pause * 2)


def per_worker(request: EngineRequest) -> dict[str, float]:
    return {name: amount for name, amount in request.wanted.per_worker.items() if amount > 0}


def _reason(errors: ExceptionGroup) -> str:
    """The first error, in one line; what nobody expects goes to the log with its traceback."""
    first: Exception = errors
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, NoSuchSliceError):
        return str(first)
    if not isinstance(first, RayError | TimeoutError):
        logger.warning("reserving failed with an error that is not Ray's", exc_info=first)
    return describe(first)


async def _all(work: Any) -> None:
    await asyncio.gather(*work)


async def _is_done(ref: Awaitable[Any]) -> bool:
    try:
        return bool(await ref)
    except RayError:
        return True  # it is gone already, and that is all that was wanted
