"""The modelled world: capacity, losses, notices, reservations, and how messages travel.

It answers the brain's commands as an engine and its agents would, with latency, and does to itself what
faults tell it to. It knows nothing of what the brain intends. What workers do is in ``processes``, storage
in ``storage``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.commands import AskReason
from everstep.control.failures import Failure, Kind
from everstep.sim.brain.clock import Action, EventClock, ModelChannel
from everstep.sim.brain.machines import Host, ModelSlice, Reservation
from everstep.sim.brain.memory import ModelMemory
from everstep.sim.brain.processes import Processes
from everstep.sim.brain.scenario import Scenario
from everstep.sim.brain.storage import Storage
from everstep.topology.slices import HostId, HostView, SliceName


class World:
    """``tell`` passes an event to whoever drives the run at the time of its delivery."""

    def __init__(self, clock: EventClock, rng: random.Random, scenario: Scenario) -> None:
        self.clock = clock
        self.rng = rng
        self.scenario = scenario
        self.slices: dict[SliceName, ModelSlice] = {}
        self.hosts: dict[HostId, Host] = {}
        self.driver = 0
        """Which driver is there, counted from 1; what was sent to another is not delivered."""
        self.tell: Callable[[e.AnyEvent], None] = lambda event: None
        self.suspended = False
        """It is there, and doesn't run."""
        self.unheard = False
        """Somebody was told of a loss while no driver lived, and may be gone before it can say so."""
        self.engine = ModelChannel(clock)
        self.notices: dict[SliceName, float] = {}
        """Deadlines of the notices that have been given and not come true or been cancelled."""
        self.reservations: dict[int, Reservation] = {}
        self.ours: set[SliceName] = set()
        """Slices that are held for the run."""
        self.asked = AskReason.NONE
        self.calm = False
        """Faults are over: nothing fails by itself any more."""
        self.hung: set[tuple[int, int]] = set()
        """(epoch, rank) of all that ever hung: word of it may come after their host is gone."""
        self.charges = 0
        """How many things happened that may cost a recovery."""
        self._machines = 0
        self.processes = Processes(self)
        self.storage = Storage(self)
        self.memory = ModelMemory(self)
        self.undriven = False
        """Workers know that there is no driver."""
        for number in range(scenario.slices):
            self.add_slice(f"slice-{number}", announce=False)

    # ------------------------------------------------------------------ chance, and messages

    def chance(self, probability: float) -> bool:
        return not self.calm and self.rng.random() < probability

    def between(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def fault(self) -> None:
        self.charges += 1

    def send(self, channel: ModelChannel, event: e.AnyEvent, latency: float = 0.0) -> None:
        """Deliver an event over this channel, if the driver that it is sent to is still there."""
        channel.send(latency or self.between(0.001, 0.05), partial(self._deliver, event, self.driver))

    def _deliver(self, event: e.AnyEvent, driver: int) -> None:
        if driver == self.driver:
            self.tell(msgspec.structs.replace(event, at=self.clock.now))

    def from_host(self, host: Host, event: e.AnyEvent, latency: float = 0.0) -> None:
        """Workers' messages say which incarnation they are about, and may come again, much later."""
        if not host.alive:
            return
        if host.frozen:
            host.held_back.append(partial(self.from_host, host, event, latency))
            return
        self.send(host.up, event, latency)
        if isinstance(event, e.WorkerEvent | e.WorkersGone) and self.chance(self.scenario.duplicates):
            host.up.send(0.0, partial(self.send, ModelChannel(self.clock), event, self.between(0.0, 60.0)))

    def to_host(self, host: Host, action: Action) -> None:
        host.down.send(self.between(0.001, 0.02), partial(self._arrive, host, action))

    def _arrive(self, host: Host, action: Action) -> None:
        if host.frozen:
            host.held_back.append(partial(self._arrive, host, action))
        elif host.alive:
            action()

    # ------------------------------------------------------------------ capacity

    def add_slice(self, name: SliceName, announce: bool = True) -> None:
        """A slice appears, or one that has lost hosts gets new machines in their places."""
        slice_ = self.slices.setdefault(name, ModelSlice(name))
        old = {host.index: host for host in slice_.hosts}
        slice_.hosts = [
            old[i] if i in old and old[i].alive else self._new_host(slice_, i)
            for i in range(self.scenario.hosts_per_slice)
        ]
        slice_.present = True
        slice_.doomed = False
        if announce:
            self.announce_capacity()

    def _new_host(self, slice_: ModelSlice, index: int) -> Host:
        self._machines += 1
        host = Host(f"{slice_.name}/{index}#{self._machines}", slice_, index, self.scenario.slots, self.clock)
        self.hosts[host.id] = host
        return host

    def remove_slice(self, name: SliceName, loud: bool = True) -> None:
        slice_ = self.slices[name]
        if not slice_.present:
            return
        slice_.present = False
        for host in slice_.hosts:
            self.kill_host(host, loud)
        self.announce_capacity()

    def view(self) -> tuple[HostView, ...]:
        return tuple(
            HostView(
                host.id,
                s.name,
                host.index,
                host.slots,
                self.scenario.hosts_per_slice,
                alive=host.listed,
                free=s.holder in (None, "us"),
            )
            for s in self.slices.values()
            if s.present
            for host in s.hosts
        )

    def announce_capacity(self) -> None:
        """As it is now; by the time it is heard, that may be old."""
        self.send(self.engine, e.CapacityChanged(at=0.0, hosts=self.view()), self.between(0.001, 0.5))

    def other_job_takes(self, name: SliceName) -> None:
        slice_ = self.slices[name]
        if slice_.holder is None and slice_.present:
            slice_.holder = "other"
            self.announce_capacity()

    def other_job_leaves(self, name: SliceName) -> None:
        slice_ = self.slices[name]
        if slice_.holder == "other":
            slice_.holder = None
            self.announce_capacity()

    # ------------------------------------------------------------------ notices

    def notice(self, slice_: ModelSlice, deadline: float, every_host: bool) -> None:
        self.notices[slice_.name] = deadline
        for host in slice_.hosts if every_host else slice_.hosts[:1]:
            word = e.PreemptionNotice(at=0.0, host=host.id, deadline=deadline)
            self.from_host(host, word, self.between(0.0, 0.1))

    def forget_notice(self, slice_: ModelSlice) -> None:
        """It has come true: nobody is left to say it again."""
        self.notices.pop(slice_.name, None)

    def cancel_notice(self, slice_: ModelSlice) -> None:
        self.notices.pop(slice_.name, None)
        host = slice_.hosts[0]
        self.from_host(host, e.NoticeCancelled(at=0.0, host=host.id))

    def repeat_notices(self) -> None:
        """To a new driver."""
        for name, deadline in self.notices.items():
            self.notice(self.slices[name], deadline, every_host=True)

    # ------------------------------------------------------------------ losing hosts

    def kill_host(self, host: Host, loud: bool) -> None:
        if not host.alive:
            return
        host.alive = False
        self._empty(host)
        notice = self.between(0.001, 0.2) if loud else self.scenario.deadlines.heartbeat_timeout_s
        kind = Kind.HOST_LOST if loud else Kind.HOST_SILENT
        self.clock.after(notice, partial(self._lost, host, kind, self.clock.now))

    def _lost(self, host: Host, kind: Kind, happened: float) -> None:
        if host.lost or (host.alive and not host.frozen):
            return
        host.lost = True
        message = "connection broken" if kind is Kind.HOST_LOST else "no heartbeat"
        failure = Failure(kind, happened, message, host=host.id)
        # The word of the loss and the new list of hosts may overtake each other.
        self.send(ModelChannel(self.clock), e.HostLost(at=0.0, host=host.id, failure=failure))
        self.announce_capacity()

    def freeze_host(self, host: Host, seconds: float) -> None:
        """Its peers wait for it, or their collectives give up first."""
        if not host.alive or host.frozen:
            return
        host.frozen = True
        for worker in [w for w in host.workers if w.running]:
            for where, peer in self.processes.members(worker.key):
                if where is not host and self.rng.random() < 0.3:
                    tired = partial(self.processes.tire_of_waiting, host, where, peer)
                    self.clock.after(self.between(0.1, 5.0), tired)
        limit = self.scenario.deadlines.heartbeat_timeout_s
        self.clock.after(limit, partial(self._lost, host, Kind.HOST_SILENT, self.clock.now))
        self.clock.after(seconds, partial(self.thaw_host, host))

    def thaw_host(self, host: Host) -> None:
        if not host.frozen:
            return
        host.frozen = False
        waiting, host.held_back = host.held_back, []
        for action in waiting:
            action()
        if host.lost:
            # It has been given up. What it had to say went out all the same; now its agent ends the workers.
            self.clock.after(self.between(0.01, 1.0), partial(self._come_back, host))

    def _come_back(self, host: Host) -> None:
        if host.lost and host.alive and not host.frozen and not host.stuck:
            self._empty(host)
            host.lost = False
            self.announce_capacity()

    def unstick(self, host: Host) -> None:
        host.stuck = False
        if host.lost:
            self._come_back(host)

    def retire(self, command: c.RetireHost) -> None:
        """The brain counts it as lost.

        Its agent ends what runs there, when it can, before it is listed again.
        """
        host = self.hosts[command.host]
        if host.alive and not host.lost:
            host.lost = True
            self.announce_capacity()
            self.clock.after(self.between(0.1, 5.0), partial(self._come_back, host))

    def _empty(self, host: Host) -> None:
        """Nothing of ours is left on this host."""
        for worker in host.workers:
            self.processes.end(worker)
        host.workers.clear()
        self.memory.forget(host)
        host.agent = host.template = False
        host.attempt += 1
        self._clean(host.slice)

    # ------------------------------------------------------------------ reservations

    def reserve(self, command: c.Reserve) -> None:
        reservation = Reservation(command.reservation, command.slices)
        self.reservations[command.reservation] = reservation
        delay = self.between(0.01, 2.0)
        if self.chance(self.scenario.slow_reservation):
            delay = self.between(1.0, 2.0 * self.scenario.deadlines.reserve_s)
            if delay > 0.9 * self.scenario.deadlines.reserve_s:
                self.fault()
        self.clock.after(delay, partial(self._answer, reservation))

    def _answer(self, reservation: Reservation, tries: int = 0) -> None:
        if not reservation.waiting:
            return
        slices = [self.slices[name] for name in reservation.slices]
        if any(s.holder == "cleaning" for s in slices) and all(s.whole for s in slices) and tries < 100:
            self.clock.after(0.5, partial(self._answer, reservation, tries + 1))
            return
        reservation.waiting = False
        refuse = self.chance(self.scenario.refused_reservation)
        if len(slices) > 1 and self.chance(self.scenario.partial_reservation):
            self._grant_in_part(reservation, [s for s in slices if s.whole and s.holder is None][:-1])
            return
        if not refuse and all(s.whole and s.holder is None for s in slices):
            for s in slices:
                s.holder = "us"
                self.ours.add(s.name)
            self.send(self.engine, e.Reserved(at=0.0, reservation=reservation.id))
        else:
            self._refuse(reservation)

    def _refuse(self, reservation: Reservation) -> None:
        self.fault()
        self.reservations.pop(reservation.id, None)
        word = e.ReservationFailed(at=0.0, reservation=reservation.id, reason="not free")
        self.send(self.engine, word)

    def _grant_in_part(self, reservation: Reservation, some: list[ModelSlice]) -> None:
        """All or none: the engine gives back what it got, and then says no."""
        for _ in range(2):
            self.fault()  # it may be too late by then, and hold up the next one
        for s in some:
            s.holder = "cleaning"
        pause = self.between(0.1, 3.0)
        for s in some:
            self.clock.after(pause, partial(self._clean, s))
        self.clock.after(pause, partial(self._refuse_if_asked, reservation))

    def _refuse_if_asked(self, reservation: Reservation) -> None:
        if self.reservations.get(reservation.id) is reservation:
            self._refuse(reservation)

    def release(self, command: c.Release) -> None:
        for reservation in list(self.reservations.values()):
            if set(reservation.slices) & set(command.slices):
                whole = set(reservation.slices) <= set(command.slices)
                assert whole or not reservation.waiting, "what has not been granted is withdrawn whole"
                reservation.waiting = False
                del self.reservations[reservation.id]
        for name in command.slices:
            slice_ = self.slices[name]
            if slice_.holder == "us":
                slice_.holder = "cleaning"
                self.ours.discard(name)
                for host in slice_.hosts:
                    self.to_host(host, partial(self._empty, host))
                self._clean(slice_)

    def _clean(self, slice_: ModelSlice) -> None:
        if slice_.holder == "cleaning" and not any(
            host.alive and not host.frozen and (host.agent or host.workers) for host in slice_.hosts
        ):
            slice_.holder = None
            self.announce_capacity()

    # ------------------------------------------------------------------ preparation

    def prepare(self, host: Host) -> None:
        host.agent = True
        host.attempt += 1
        if self.chance(self.scenario.failed_preparation):
            self.fault()
            kind = Kind.START if self.rng.random() < 0.8 else Kind.TEMPLATE
            failure = Failure(kind, self.clock.now, "import failed", host=host.id)
            word = e.HostUnprepared(at=0.0, host=host.id, failure=failure)
            self.clock.after(self.between(0.1, 3.0), partial(self.from_host, host, word))
        elif self.chance(self.scenario.hung_preparation):
            self.fault()
        else:
            self.clock.after(self.between(0.1, 3.0), partial(self._prepared, host, host.attempt))

    def _prepared(self, host: Host, attempt: int) -> None:
        if host.attempt != attempt or not host.alive:
            return
        if self.scenario.unloadable:
            failure = Failure(Kind.LOAD, self.clock.now, "No module named 'x'", host=host.id)
            self.from_host(host, e.HostUnprepared(at=0.0, host=host.id, failure=failure))
            return
        host.template = True
        self.from_host(host, e.HostPrepared(at=0.0, host=host.id))

    def kill_template(self, host: Host) -> None:
        """Its workers die with it. Agents should say so first, and may not get to."""
        if not host.template or host.frozen:
            return
        host.template = False
        failure = Failure(Kind.TEMPLATE, self.clock.now, "SIGKILL", host=host.id)
        word = e.HostUnprepared(at=0.0, host=host.id, failure=failure)
        first = self.rng.random() < 0.5
        if first:
            self.from_host(host, word)
        for worker in host.workers:
            self.processes.crash(host, worker, Kind.SIGNAL)
        if not first:
            self.fault()  # it may be seen as a start that fails
            self.from_host(host, word)
