"""The drivers of a simulated run, one after the other: each has a brain, timers, and what the journal tells
the next.

A driver keeps no opinion: events go to its brain, and the brain's commands go to the world.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller
from everstep.control.failures import Budget
from everstep.control.table import Phase
from everstep.sim.brain.clock import Action, EventClock
from everstep.sim.brain.machines import Life, ModelWorker
from everstep.sim.brain.story import Story
from everstep.sim.brain.violation import Violation
from everstep.sim.brain.world import World
from everstep.topology.placement import Assignment
from everstep.topology.slices import SliceName

Watch = Callable[[e.AnyEvent, list[c.AnyCommand]], None]


class Drivers:
    def __init__(self, clock: EventClock, world: World, story: Story, watch: Watch) -> None:
        self.clock = clock
        self.world = world
        self.story = story
        self.brain = Controller(world.scenario.settings)
        self.outcome: c.EndRun | None = None
        self.started: list[c.StartWorkers] = []
        """Every start, in order: what agents know of the run's workers."""
        self.entered: Callable[[Phase], None] = lambda phase: None
        """Told of every phase that the run gets into."""
        self._watch = watch
        self._timers: dict[tuple[e.TimerName, int], int] = {}
        self._timers_set = 0
        self._last_epoch = 0
        self._spent: dict[Budget, int] = {}
        self._notices: dict[SliceName, e.Notice] = {}
        """By the world's clock."""
        self._ahead = 0.0
        """By how much the driver's clock is ahead of the world's: each machine counts from its own start."""
        self.absent = False
        self._held_back: list[Action] = []
        self._due: list[Action] = []
        """Timers that ran out while the driver was suspended."""
        world.tell = self.tell
        world.storage.newest = self._newest

    def has_ended(self) -> bool:
        return self.outcome is not None

    def _newest(self) -> str | None:
        return self.brain.newest.folder if self.brain.newest is not None else None

    def open(self) -> None:
        self.world.driver += 1
        self.entered(Phase.NEW)
        self.clock.after(0.0, self._open)

    def _open(self) -> None:
        self.tell(e.CapacityChanged(at=self.clock.now, hosts=self.world.view()))
        self.tell(e.RunOpened(at=self.clock.now))

    def tell(self, event: e.AnyEvent) -> None:
        """Pass an event to the brain, and carry out what it wants."""
        if self.absent:
            return
        if self.world.suspended:
            self._held_back.append(partial(self._tell_late, event))
            return
        if self._ahead:
            event = _shifted(event, self._ahead)
        if isinstance(event, e.CheckpointDamaged):
            self.world.storage.known_damaged.add(event.folder)
        self.story.tell(self.clock.now, "→", event)
        commands = self.brain.handle(event)
        for command in commands:
            self.story.tell(self.clock.now, "←", command)
            self._do(command)
        self._watch(event, commands)

    def _tell_late(self, event: e.AnyEvent) -> None:
        self.tell(msgspec.structs.replace(event, at=self.clock.now))

    def suspend(self, seconds: float) -> None:
        """It doesn't run for a while. When it does, it hears what came meanwhile, then what time is up."""
        if not self.absent and not self.world.suspended and not self.has_ended():
            self.world.suspended = True
            self.clock.after(seconds, partial(self._resume, self.world.driver))

    def _resume(self, driver: int) -> None:
        if driver != self.world.driver or not self.world.suspended:
            return
        self.world.suspended = False
        waiting, self._held_back, self._due = self._held_back + self._due, [], []
        for action in waiting:
            action()

    def _do(self, command: c.AnyCommand) -> None:
        world = self.world
        match command:
            case c.SetTimer():
                self._set_timer(command)
            case c.CancelTimer():
                self._timers.pop((command.timer, command.key), None)
            case c.Reserve():
                world.reserve(command)
            case c.Release():
                world.release(command)
            case c.PrepareHost():
                host = world.hosts[command.host]
                world.to_host(host, partial(world.prepare, host))
            case c.RetireHost():
                world.retire(command)
            case c.StartWorkers():
                self.started.append(command)
                world.processes.start(command)
            case c.StopWorkers():
                world.processes.stop(command)
            case c.KeepSnapshot():
                world.memory.keep(command)
            case c.ExamineWorkers():
                host = world.hosts[command.host]
                world.to_host(host, partial(world.processes.examine, host, command))
            case c.AskCheckpoint():
                world.asked = command.reason
            case c.CommitCheckpoint():
                world.storage.commit(command)
            case c.DiscardCheckpoint():
                world.storage.discard(command)
            case c.EndRun():
                self.outcome = command
            case c.PhaseChanged():
                self._last_epoch = max(self._last_epoch, command.epoch)
                self.entered(Phase(command.phase))
            case c.RecoveryDecided():
                self._spent[Budget(command.budget)] = command.spent
            case c.PreemptionSeen():
                self._notices.pop(command.slice, None)
                if command.deadline is not None:
                    deadline = command.deadline - self._ahead
                    self._notices[command.slice] = e.Notice(command.slice, deadline, command.hosts)
            case _:
                pass  # a request or a record that changes nothing here

    def _set_timer(self, command: c.SetTimer) -> None:
        self._timers_set += 1
        number = self._timers_set
        name = (command.timer, command.key)
        self._timers[name] = number
        self.clock.at(command.at - self._ahead, partial(self._fire, name, number))

    def _fire(self, name: tuple[e.TimerName, int], number: int) -> None:
        if self.world.suspended:
            self._due.append(partial(self._fire, name, number))
        elif self._timers.get(name) == number:
            del self._timers[name]
            self.tell(e.TimerFired(at=self.clock.now, timer=name[0], key=name[1]))

    # ------------------------------------------------------------------ take-over

    def die(self, absence: float, fenced_later: bool) -> None:
        """The driver is gone, or paused for so long that another one has taken its place when it wakes."""
        if self.absent or self.has_ended():
            return
        old = self.brain
        self.absent = self.world.undriven = True
        self.world.suspended = False
        self._held_back, self._due = [], []
        self.world.driver += 1
        self._timers.clear()
        for reservation in list(self.world.reservations.values()):
            # What nobody waits for any more is withdrawn with its driver.
            if reservation.waiting:
                self.world.release(c.Release(reservation.slices))
        self.clock.after(absence, self._take_over)
        if fenced_later:
            self.clock.after(absence + 1.0, partial(self._fence, old))

    def _fence(self, old: Controller) -> None:
        """It wakes, and finds at its first record that the journal is another's. What comes then is nothing
        to it.
        """
        now = self.clock.now + self._ahead
        said = old.handle(e.LeaseLost(at=now, holder="a later driver"))
        late: list[e.AnyEvent] = [
            e.CapacityChanged(at=now, hosts=self.world.view()),
            e.TimerFired(at=now, timer=e.TimerName.BACKOFF, key=2),
            e.StopRequested(at=now, kind=e.StopKind.USER),
        ]
        for event in late:
            said += old.handle(event)
        if not all(isinstance(word, c.EndRun) and word.outcome is c.Outcome.FENCED for word in said):
            raise Violation(f"8: a fenced driver acts: {said}")

    def _take_over(self) -> None:
        self.world.driver += 1
        self._ahead += self.world.scenario.clock_apart
        adopted = self._adoptable()
        remains = self._remains() if adopted is None else None
        kept = {a.slice for a in adopted.assignments} if adopted else set(remains.slices if remains else ())
        for s in self.world.slices.values():
            if s.holder == "us" and s.name not in kept:
                self.world.release(c.Release((s.name,)))
        self.world.reservations.clear()
        if adopted is None:  # what will be restored is looked at first
            self.world.storage.known_damaged |= self.world.storage.damaged
        self.brain = Controller(self.world.scenario.settings)
        self.absent = self.world.undriven = False
        self.tell(e.CapacityChanged(at=self.clock.now, hosts=self.world.view()))
        self.tell(
            e.RunOpened(
                at=self.clock.now,
                last_epoch=self._last_epoch,
                checkpoints=tuple(self.world.storage.restorable()),
                let_go=tuple(self.world.storage.let_go()),
                spent=tuple(self._spent.items()),
                notices=tuple(self._notices.values()),
                adopted=adopted,
                remains=remains,
            )
        )
        self.world.repeat_notices()
        if adopted is not None:
            self._say_again(adopted)

    def _adoptable(self) -> e.Adopted | None:
        """The groups of the newest epoch of which every worker is there, and trains or has returned; without
        those that share a slice with one that isn't.
        """
        if not self.started or self.started[-1].epoch != self._last_epoch:
            return None
        places: dict[int, Assignment] = {}
        generations: dict[int, int] = {}
        for start in self.started:
            if start.epoch == self._last_epoch:
                places.update((a.rank, a) for a in start.assignments)
                generations.update(start.generations)
        broken = {a.group_id for a in places.values() if not self._is_kept(a, generations[a.group_id])}
        while True:
            spoilt = {a.slice for a in places.values() if a.group_id in broken}
            more = {a.group_id for a in places.values() if a.slice in spoilt} - broken
            if not more:
                break
            broken |= more
        found = tuple(a for _, a in sorted(places.items()) if a.group_id not in broken)
        if not found:
            return None
        outdated = self.world.chance(self.world.scenario.new_code)
        copies = tuple(copy for place in found for copy in self.world.memory.copies(place))
        return e.Adopted(self._last_epoch, found, tuple(sorted(generations.items())), outdated, copies)

    def _remains(self) -> e.Remains | None:
        """What the hosts of the last workers have in memory, if all of them answer and have ended these."""
        world = self.world
        places = self.started[-1].assignments if self.started else ()
        hosts = {a.host: world.hosts[a.host] for a in places}
        slices = {a.slice: world.slices[a.slice] for a in places}
        if (
            not (world.scenario.snapshots and places)
            or any(s.holder != "us" or len({*s.hosts} - {*hosts.values()}) for s in slices.values())
            or any(not h.listed or not h.agent or h.frozen or h.stuck for h in hosts.values())
        ):
            return None
        for worker in [worker for host in hosts.values() for worker in host.workers]:
            world.processes.end(worker)
        return e.Remains(
            tuple(sorted(slices)),
            tuple((a.rank, a.host) for a in places),
            tuple(copy for a in places for copy in world.memory.copies(a)),
        )

    def _is_kept(self, place: Assignment, generation: int) -> bool:
        host = self.world.hosts[place.host]
        worker = self._worker(place, generation)
        if worker is None or worker.stuck or not host.listed or not host.template:
            return False
        trains = worker.life is Life.TRAINING and not worker.stopping
        return not host.frozen and not host.stuck and (trains or worker.life is Life.RETURNED)

    def _worker(self, place: Assignment, generation: int) -> ModelWorker | None:
        for worker in self.world.hosts[place.host].workers:
            if (worker.epoch, worker.rank, worker.generation) == (self._last_epoch, place.rank, generation):
                return worker
        return None

    def _say_again(self, adopted: e.Adopted) -> None:
        generations = dict(adopted.generations)
        for place in adopted.assignments:
            worker = self._worker(place, generations[place.group_id])
            assert worker is not None
            self.world.processes.say_again(self.world.hosts[place.host], worker)


def _shifted(event: e.AnyEvent, by: float) -> e.AnyEvent:
    """The same event by a clock that is so far ahead."""
    changes: dict[str, object] = {"at": event.at + by}
    match event:
        case e.HostLost() | e.HostUnprepared() | e.WorkerFailed():
            changes["failure"] = msgspec.structs.replace(event.failure, at=event.failure.at + by)
        case e.PreemptionNotice():
            changes["deadline"] = event.deadline + by
        case e.RunOpened():
            changes["notices"] = tuple(
                msgspec.structs.replace(n, deadline=n.deadline + by) for n in event.notices
            )
        case _:
            pass
    return msgspec.structs.replace(event, **changes)
