"""The faults of a schedule: when they strike, and whom. What a fault does to the world is the world's."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from everstep.control import events as e
from everstep.control.failures import Kind
from everstep.control.table import Phase
from everstep.sim.brain.clock import EventClock
from everstep.sim.brain.drivers import Drivers
from everstep.sim.brain.machines import Host, Life, ModelSlice
from everstep.sim.brain.scenario import Family, Scenario
from everstep.sim.brain.story import Story
from everstep.sim.brain.world import World

LOOK_S = 5.0
"""How often agents look at their workers."""


class Faults:
    def __init__(
        self, clock: EventClock, scenario: Scenario, world: World, drivers: Drivers, story: Story
    ) -> None:
        self.clock = clock
        self.rng = random.Random(0)
        """That of the fault at hand."""
        self.scenario = scenario
        self.world = world
        self.drivers = drivers
        self.story = story
        self.strikes: dict[Family, Callable[[], str]] = {
            Family.CRASH: self._crash,
            Family.TEMPLATE: self._kill_template,
            Family.LOSS: self._lose,
            Family.RACK: self._lose_rack,
            Family.FREEZE: self._freeze,
            Family.STUCK: self._stick,
            Family.PREEMPT: self._preempt,
            Family.NOTICE: self._threaten,
            Family.FLAP: self._flap,
            Family.STORAGE: self._damage,
            Family.DRIVER: self._take_over,
            Family.CLOCK: self._suspend,
            Family.STOP: self._stop,
            Family.HANG: self._hang,
        }

    def schedule(self) -> None:
        for strike in self.scenario.strikes:
            self.clock.at(strike.at, partial(self._strike, strike.family, strike.seed))
        self.clock.at(self.scenario.fault_s, self.calm)
        self.drivers.entered = self._entered
        if Family.HANG in self.scenario.families:
            self.clock.after(LOOK_S, self._look)

    def _look(self) -> None:
        self.world.processes.look()
        if not self.drivers.has_ended():
            self.clock.after(LOOK_S, self._look)

    def _entered(self, phase: Phase) -> None:
        if phase is self.scenario.stop_in and not self.world.calm:
            self.clock.after(0.0, partial(self._strike, Family.STOP, self.scenario.seed))

    def _strike(self, family: Family, seed: int) -> None:
        if self.world.calm or self.drivers.has_ended():
            return
        self.rng = random.Random(seed)
        what = self.strikes[family]()
        if what:
            self.story.tell(self.clock.now, "world", what)

    def calm(self) -> None:
        """No more faults; and there is enough capacity, if not at once."""
        if self.world.calm:
            return
        self.story.tell(self.clock.now, "world", "faults are over")
        self.world.calm = True
        for slice_ in list(self.world.slices.values()):
            self._repair(slice_)

    def _repair(self, slice_: ModelSlice) -> None:
        for host in slice_.hosts:
            if host.frozen:
                self.world.thaw_host(host)
            if host.stuck:
                self.world.unstick(host)
        self.world.other_job_leaves(slice_.name)
        self.world.add_slice(slice_.name)

    # ------------------------------------------------------------------ whom

    def _host(self) -> Host:
        """Rather one that matters."""
        hosts = [h for s in self.world.slices.values() for h in s.hosts if h.alive]
        busy = [h for h in hosts if h.agent]
        return self.rng.choice(
            busy if busy and self.rng.random() < 0.8 else hosts or list(self.world.hosts.values())
        )

    def _slice(self) -> ModelSlice:
        return self._host().slice

    def _repair_later(self, slice_: ModelSlice) -> None:
        if self.rng.random() < 0.7:
            self.clock.after(self.rng.uniform(0.1, 200.0), partial(self._repair, slice_))

    # ------------------------------------------------------------------ what

    def _crash(self) -> str:
        workers = [(h, w) for h in self.world.hosts.values() for w in h.workers if w.running]
        if not workers:
            return ""
        host, worker = self.rng.choice(workers)
        kind = self.rng.choice((Kind.EXCEPTION, Kind.EXIT, Kind.SIGNAL, Kind.OOM))
        self.world.fault()
        self.world.processes.crash(host, worker, kind)
        return f"rank {worker.rank} of epoch {worker.epoch} crashes: {kind}"

    def _hang(self) -> str:
        """One that has trained: what is new may be slow for reasons of its own."""
        found = [
            w for h in self.world.hosts.values() for w in h.workers if w.life is Life.TRAINING and w.reports
        ]
        if not found:
            return ""
        worker = self.rng.choice(found)
        self.world.fault()
        worker.hung = True
        self.world.hung.add((worker.epoch, worker.rank))
        return f"rank {worker.rank} of epoch {worker.epoch} hangs"

    def _kill_template(self) -> str:
        host = self._host()
        self.world.fault()
        self.world.kill_template(host)
        return f"the template on {host.id} dies"

    def _lose(self) -> str:
        host = self._host()
        loud = self.rng.random() < 0.5
        self.world.fault()
        self.world.kill_host(host, loud)
        self._repair_later(host.slice)
        return f"{host.id} is lost, {'loudly' if loud else 'silently'}"

    def _lose_rack(self) -> str:
        """Slices share racks: whatever they share, one host of each goes at the same instant."""
        slices = [s for s in self.world.slices.values() if s.present]
        hit = self.rng.sample(slices, min(len(slices), self.rng.randint(2, 3)))
        self.world.fault()
        loud = self.rng.random() < 0.5
        for slice_ in hit:
            host = self.rng.choice(slice_.hosts)
            self.world.fault()
            self.world.kill_host(host, loud)
            self._repair_later(slice_)
        return f"a rack goes: {', '.join(s.name for s in hit)} lose a host each"

    def _freeze(self) -> str:
        host = self._host()
        seconds = self.rng.choice((0.5, 2.0, 10.0, 100.0)) * self.rng.uniform(0.5, 2.0)
        self.world.fault()
        self.world.freeze_host(host, seconds)
        return f"{host.id} freezes for {seconds:.1f} s"

    def _stick(self) -> str:
        host = self._host()
        if host.stuck or not host.alive:
            return ""
        host.stuck = True
        self.world.fault()
        self.clock.after(self.rng.uniform(1.0, 60.0), partial(self.world.unstick, host))
        busy = [w for w in host.workers if w.running]
        if busy:
            self.world.processes.crash(host, busy[0], Kind.EXCEPTION)
        return f"workers on {host.id} can't be killed for a while"

    def _preempt(self) -> str:
        """A notice that comes true, a little early or late, or is cancelled in time; or two of them."""
        how = self.rng.choice(("true", "early", "late", "cancelled", "staggered"))
        if how != "staggered":
            return self._notice(self._slice(), how, self.rng.choice((1.0, 15.0, 60.0)))
        slices = self.rng.sample(sorted(self.world.slices), min(len(self.world.slices), 2))
        told = [self._notice(self.world.slices[name], "true", self.rng.uniform(5.0, 40.0)) for name in slices]
        return "; ".join(filter(None, told))

    def _threaten(self) -> str:
        how = self.rng.choice(("much too late", "never"))
        return self._notice(self._slice(), how, self.rng.choice((1.0, 15.0, 60.0)))

    def _notice(self, slice_: ModelSlice, how: str, lead: float) -> str:
        if not slice_.whole or slice_.name in self.world.notices or slice_.doomed:
            return ""  # a second notice would blur what each is for
        deadline = self.clock.now + lead
        self.world.fault()
        self.world.unheard |= self.drivers.absent
        self.world.notice(slice_, deadline, every_host=self.rng.random() < 0.5)
        notice = self.scenario.deadlines.notice_s
        dies = {
            "true": lead,
            "early": max(0.3, lead * self.rng.random()),
            "late": lead + 0.8 * notice * self.rng.random(),
            "much too late": lead + notice + 20.0 * self.rng.random(),
        }.get(how)
        if how == "much too late":
            self.world.fault()  # it is believed once, and later comes as a surprise
        if dies is not None:
            self.clock.after(dies, partial(self._take_away, slice_, list(slice_.hosts)))
        elif how == "cancelled":
            self.clock.after(0.2 + lead * self.rng.random(), partial(self.world.cancel_notice, slice_))
        return f"{slice_.name} gets a notice, {how}: {lead:.0f} s"

    def _take_away(self, slice_: ModelSlice, noticed: list[Host]) -> None:
        """A notice is about machines: others that have come in their place stay."""
        if slice_.hosts != noticed:
            self.world.forget_notice(slice_)
            return
        if self.world.calm or not slice_.present:
            return
        slice_.doomed = True
        self.story.tell(self.clock.now, "world", f"{slice_.name} is taken away")
        self.world.fault()  # workers may have left it, and come back for want of another place
        if self.rng.random() < 0.5:
            self.world.fault()  # the workers may be back before the machine goes
            for host in slice_.hosts:
                for worker in [w for w in host.workers if w.running]:
                    self.world.processes.crash(host, worker, Kind.SIGNAL)
        self.clock.after(self.rng.uniform(0.0, 0.5), partial(self._remove, slice_, noticed))
        self.clock.after(self.rng.uniform(5.0, 200.0), partial(self.world.add_slice, slice_.name))

    def _remove(self, slice_: ModelSlice, noticed: list[Host]) -> None:
        self.world.forget_notice(slice_)
        if slice_.hosts == noticed:
            self.world.remove_slice(slice_.name)

    def _flap(self) -> str:
        slice_ = self.rng.choice(list(self.world.slices.values()))
        match self.rng.choice(("add", "remove", "other")):
            case "add":
                name = f"slice-{len(self.world.slices)}"
                if len(self.world.slices) < self.scenario.slices + 3:
                    self.world.add_slice(name)
                return f"{name} appears"
            case "remove":
                self.world.fault()
                self.world.remove_slice(slice_.name, self.rng.random() < 0.7)
                self._repair_later(slice_)
                return f"{slice_.name} disappears"
            case _:
                self.world.other_job_takes(slice_.name)
                self.clock.after(
                    self.rng.uniform(1.0, 300.0), partial(self.world.other_job_leaves, slice_.name)
                )
                return f"another job wants {slice_.name}"

    def _take_over(self) -> str:
        self.world.fault()
        dead = self.rng.random() < 0.5
        self.drivers.die(self.rng.uniform(0.1, 20.0), fenced_later=not dead)
        return f"the driver {'dies' if dead else 'is paused and replaced'}"

    def _suspend(self) -> str:
        """The driver's machine sleeps, or the driver gets no processor: time jumps, and all comes at once."""
        seconds = self.rng.choice((1.0, 10.0, 60.0)) * self.rng.uniform(0.5, 2.0)
        self.drivers.suspend(seconds)
        return f"the driver is suspended for {seconds:.1f} s"

    def _damage(self) -> str:
        """A bit rots in the newest checkpoint: whoever restores it says so."""
        committed = self.world.storage.committed
        if not committed or self.rng.random() < 0.7:
            return ""
        self.world.fault()
        self.world.storage.damaged.add(committed[-1].folder)
        return f"{committed[-1].folder} is damaged"

    def _stop(self) -> str:
        now = self.rng.random() < 0.3
        kind = self.rng.choice(list(e.StopKind))
        self.drivers.tell(e.StopRequested(at=self.clock.now, kind=kind, now=now))
        if not now and self.rng.random() < 0.5:
            self.clock.after(self.rng.uniform(0.0, 10.0), partial(self._stop_again, kind))
        return f"the user stops the run{', at once' if now else ''}"

    def _stop_again(self, kind: e.StopKind) -> None:
        self.drivers.tell(e.StopRequested(at=self.clock.now, kind=kind, now=True))
