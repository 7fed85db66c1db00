"""The faults of a schedule: when they strike, and whom. What a fault does is the cluster's, the store's or
the drivers' affair.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from everstep.control import events as e
from everstep.control.table import Phase
from everstep.failures import Kind
from everstep.sim.agents import SimAgent, lose_orders, measure_progress
from everstep.sim.cluster import Cluster, SimSlice
from everstep.sim.scenario import FaultKind, Scenario
from everstep.sim.seats import Seats
from everstep.sim.storage_faults import OF_STORAGE, StorageFaults
from everstep.sim.story import Story
from everstep.sim.time import VirtualTime
from everstep.sim.workers import SimLife

MEASURE_S = 5.0
"""How often agents measure the progress of their workers."""


class ScheduledFaults:
    """Those of one schedule."""

    def __init__(
        self, scenario: Scenario, time: VirtualTime, cluster: Cluster, seats: Seats, story: Story
    ) -> None:
        self._scenario = scenario
        self._time = time
        self._cluster = cluster
        self._seats = seats
        self._story = story
        self._storage = StorageFaults(time, cluster, seats)

    def schedule(self) -> None:
        for strike in self._scenario.strikes:
            self._time.at(strike.at, partial(self._strike, strike.family, strike.seed))
        self._time.at(self._scenario.fault_s, self.calm)
        if FaultKind.HANG in self._scenario.families:
            self._time.after(MEASURE_S, self._measure)

    def _measure(self) -> None:
        for agent in self._cluster.hosts.values():
            measure_progress(agent, self._scenario.deadlines.hang_s / 2)
        if not self._time.over:
            self._time.after(MEASURE_S, self._measure)

    def entered(self, phase: Phase) -> None:
        """The run has got into this phase."""
        if phase is self._scenario.stop_in and not self._cluster.calm:
            self._time.after(0.0, partial(self._strike, FaultKind.STOP, self._scenario.seed))

    def _strike(self, family: FaultKind, seed: int) -> None:
        if self._cluster.calm or self._time.over:
            return
        blow = Blow(random.Random(seed), self._scenario, self._time, self._cluster, self._seats, self._story)
        what = self._storage.strike(family, blow.rng) if family in OF_STORAGE else _BLOWS[family](blow)
        if what:
            self._story.add(self._time.now, "world", what)

    def calm(self) -> None:
        """No more faults; and there is enough capacity, if not at once."""
        if self._cluster.calm:
            return
        self._story.add(self._time.now, "world", "faults are over")
        self._cluster.calm = True
        self._storage.calm()
        self._seats.calm_down()
        for slice_ in list(self._cluster.slices.values()):
            repair(self._cluster, slice_)


def repair(cluster: Cluster, slice_: SimSlice) -> None:
    for agent in slice_.hosts:
        cluster.thaw(agent)
        agent.stuck.end()
    cluster.other_job(slice_, False)
    cluster.add_slice(slice_.name)


class Blow:
    """One fault that strikes now. What it draws is its own, so that leaving one out leaves the others as they
    were.
    """

    def __init__(
        self,
        rng: random.Random,
        scenario: Scenario,
        time: VirtualTime,
        cluster: Cluster,
        seats: Seats,
        story: Story,
    ) -> None:
        self.rng = rng
        self._scenario = scenario
        self._time = time
        self._cluster = cluster
        self._seats = seats
        self._story = story

    # ------------------------------------------------------------------ whom

    def _host(self) -> SimAgent:
        """Rather one that matters."""
        hosts = [h for s in self._cluster.slices.values() for h in s.hosts if h.alive]
        busy = [h for h in hosts if h.claim.run]
        return self.rng.choice(
            busy if busy and self.rng.random() < 0.8 else hosts or list(self._cluster.hosts.values())
        )

    def _repair_later(self, slice_: SimSlice) -> None:
        if self.rng.random() < 0.7:
            self._time.after(self.rng.uniform(0.1, 100.0), partial(repair, self._cluster, slice_))

    # ------------------------------------------------------------------ workers and hosts

    def crash(self) -> str:
        workers = [w for w in self._cluster.workers() if w.running]
        if not workers:
            return ""
        worker = self.rng.choice(workers)
        kind = self.rng.choice((Kind.EXCEPTION, Kind.EXIT, Kind.SIGNAL, Kind.OOM))
        self._cluster.fault()
        worker.crash(kind)
        return f"rank {worker.rank} of epoch {worker.spec.epoch} crashes: {kind}"

    def hang(self) -> str:
        """One that has trained: what is new may be slow for reasons of its own."""
        found = [w for w in self._cluster.workers() if w.life is SimLife.TRAINING and w.reports]
        if not found:
            return ""
        worker = self.rng.choice(found)
        self._cluster.fault()
        worker.hung = True
        self._cluster.hung.add((worker.spec.epoch, worker.rank))
        return f"rank {worker.rank} of epoch {worker.spec.epoch} hangs"

    def kill_template(self) -> str:
        agent = self._host()
        self._cluster.fault()
        agent.kill_template()
        return f"the template on {agent.host} dies"

    def lose(self) -> str:
        agent = self._host()
        loud = self.rng.random() < 0.5
        self._cluster.fault()
        self._cluster.kill_host(agent, loud)
        self._repair_later(agent.slice)
        return f"{agent.host} is lost, {'loudly' if loud else 'silently'}"

    def lose_rack(self) -> str:
        """Slices share a rack that fails: one host of each goes at the same instant."""
        slices = [s for s in self._cluster.slices.values() if s.present]
        hit = self.rng.sample(slices, min(len(slices), self.rng.randint(2, 3)))
        self._cluster.fault()
        loud = self.rng.random() < 0.5
        for slice_ in hit:
            self._cluster.fault()
            self._cluster.kill_host(self.rng.choice(slice_.hosts), loud)
            self._repair_later(slice_)
        return f"a rack goes: {', '.join(s.name for s in hit)} lose a host each"

    def freeze(self) -> str:
        agent = self._host()
        seconds = self.rng.choice((0.5, 2.0, 10.0, 60.0)) * self.rng.uniform(0.5, 2.0)
        self._cluster.fault()
        self._cluster.freeze(agent, seconds)
        return f"{agent.host} freezes for {seconds:.1f} s"

    def stick(self) -> str:
        agent = self._host()
        if agent.stuck.is_stuck or not agent.alive:
            return ""
        agent.stuck.is_stuck = True
        self._cluster.fault()
        self._time.after(self.rng.uniform(1.0, 60.0), agent.stuck.end)
        busy = [w for w in agent.workers.values() if w.running]
        if busy:
            busy[0].crash(Kind.EXCEPTION)
        return f"workers on {agent.host} can't be killed for a while"

    def cut_power(self) -> str:
        for seat in self._seats.living():
            self._seats.kill(seat)
        for slice_ in self._cluster.slices.values():
            for agent in slice_.hosts:
                self._cluster.fault()
                self._cluster.kill_host(agent, loud=True)
            self._time.after(self.rng.uniform(1.0, 5.0), partial(repair, self._cluster, slice_))
        return "the power is cut"

    # ------------------------------------------------------------------ capacity

    def preempt(self) -> str:
        """A notice that comes true, a little early or late, or is cancelled in time; or two of them."""
        how = self.rng.choice(("true", "early", "late", "cancelled", "staggered"))
        if how != "staggered":
            return self._notice(self._host().slice, how, self.rng.choice((1.0, 15.0, 60.0)))
        names = sorted(self._cluster.slices)
        some = self.rng.sample(names, min(len(names), 2))
        notices = [self._notice(self._cluster.slices[n], "true", self.rng.uniform(5.0, 40.0)) for n in some]
        return "; ".join(filter(None, notices))

    def threaten(self) -> str:
        how = self.rng.choice(("much too late", "never"))
        return self._notice(self._host().slice, how, self.rng.choice((1.0, 15.0, 60.0)))

    def _notice(self, slice_: SimSlice, how: str, lead: float) -> str:
        if not slice_.whole or slice_.deadline is not None or slice_.doomed:
            return ""  # a second notice would blur what each is for
        cluster = self._cluster
        cluster.fault()
        owner = self._seats.owner()
        cluster.unheard |= owner is None or owner.process.paused
        cluster.notice(slice_, self._time.now + lead, every_host=self.rng.random() < 0.5)
        notice = self._scenario.deadlines.notice_s
        dies = {
            "true": lead,
            "early": max(0.3, lead * self.rng.random()),
            "late": lead + 0.8 * notice * self.rng.random(),
            "much too late": lead + notice + 20.0 * self.rng.random(),
        }.get(how)
        if how == "much too late":
            cluster.fault()  # it is believed once, and later comes as a surprise
        if dies is not None:
            self._time.after(dies, partial(self._take_away, slice_, list(slice_.hosts)))
        elif how == "cancelled":
            self._time.after(0.2 + lead * self.rng.random(), partial(cluster.cancel_notice, slice_))
        return f"{slice_.name} gets a notice, {how}: {lead:.0f} s"

    def _take_away(self, slice_: SimSlice, noticed: list[SimAgent]) -> None:
        """A notice is about machines: others that have come in their place stay."""
        if slice_.hosts != noticed:
            slice_.deadline = None
            return
        if self._cluster.calm or not slice_.present:
            return
        slice_.doomed = True
        self._story.add(self._time.now, "world", f"{slice_.name} is taken away")
        self._cluster.fault()  # workers may have left it, and come back for want of another place
        if self.rng.random() < 0.5:
            self._cluster.fault()  # the workers may be back before the machine goes
            for agent in slice_.hosts:
                for worker in [w for w in agent.workers.values() if w.running]:
                    worker.crash(Kind.SIGNAL)
        self._time.after(self.rng.uniform(0.0, 0.5), partial(self._remove, slice_, noticed))
        self._time.after(self.rng.uniform(5.0, 100.0), partial(self._cluster.add_slice, slice_.name))

    def _remove(self, slice_: SimSlice, noticed: list[SimAgent]) -> None:
        slice_.deadline = None
        if slice_.hosts == noticed:
            self._cluster.remove_slice(slice_)

    def flap(self) -> str:
        cluster = self._cluster
        slice_ = self.rng.choice(list(cluster.slices.values()))
        match self.rng.choice(("add", "remove", "other")):
            case "add":
                name = f"slice-{len(cluster.slices)}"
                if len(cluster.slices) < self._scenario.slices + 3:
                    cluster.add_slice(name)
                return f"{name} appears"
            case "remove":
                cluster.fault()
                cluster.remove_slice(slice_, self.rng.random() < 0.7)
                self._repair_later(slice_)
                return f"{slice_.name} disappears"
            case _:
                cluster.other_job(slice_, True)
                self._time.after(self.rng.uniform(1.0, 100.0), partial(cluster.other_job, slice_, False))
                return f"another job wants {slice_.name}"

    # ------------------------------------------------------------------ drivers

    def replace_driver(self) -> str:
        """It dies, or is paused until another has taken the run, and put old records together; or another
        comes beside it.
        """
        seats, living = self._seats, self._seats.living()
        self._cluster.fault()
        how = self.rng.choice(("dies", "dies", "is paused and replaced", "gets another beside it"))
        if not living:
            return ""
        seat = self.rng.choice(living)
        if how == "dies":
            seats.kill(seat)
            self._time.after(self.rng.uniform(0.1, 20.0), seats.start_again)
        elif len(living) < 3:
            if how == "is paused and replaced":
                seat.process.pause(self.rng.uniform(18.0, 45.0))
            seats.start()
        return f"{seat.name} {how}"

    def come_back(self) -> str:
        """A host counts as lost, and its workers are replaced. The driver dies; the host is back, unasked,
        before the next one comes, and another one is silent then.
        """
        busy = [host for host in self._cluster.hosts.values() if host.listed and host.workers]
        agent = self.rng.choice(busy) if busy else self._host()
        self._cluster.fault()
        self._cluster.freeze(agent, 300.0)
        pause = self._scenario.deadlines.heartbeat_timeout_s + self.rng.uniform(5.0, 20.0)
        self._time.after(pause, partial(self._swap, agent))
        return f"{agent.host} freezes until the next take-over"

    def _swap(self, back: SimAgent) -> None:
        if self._cluster.calm or self._time.over:
            return
        for seat in self._seats.living():
            self._seats.kill(seat)
        lose_orders(back)
        self._cluster.thaw(back)
        busy = [host for host in self._cluster.hosts.values() if host.listed and host.workers]
        others = [host for host in busy if host is not back and not host.frozen]
        ranks = {rank for _, rank in back.workers}
        heirs = [host for host in others if ranks & {rank for _, rank in host.workers}]
        if others:
            silent = self.rng.choice(heirs or others)
            self._cluster.fault()
            self._cluster.freeze(silent, self.rng.uniform(10.0, 60.0))
            what = f"drivers die, {back.host} is back, and {silent.host} freezes"
            self._story.add(self._time.now, "world", what)
        self._time.after(self.rng.uniform(0.1, 5.0), self._seats.start_again)

    def suspend(self) -> str:
        """The driver's machine sleeps, or the driver gets no processor: time jumps, and all comes at once."""
        seconds = self.rng.choice((1.0, 10.0, 60.0)) * self.rng.uniform(0.5, 2.0)
        living = self._seats.living()
        if not living:
            return ""
        seat = self.rng.choice(living)
        seat.process.pause(seconds)
        return f"{seat.name} is suspended for {seconds:.1f} s"

    def stop(self) -> str:
        now = self.rng.random() < 0.3
        kind = self.rng.choice(list(e.StopKind))
        self._seats.stop(kind, now)
        if not now and self.rng.random() < 0.5:
            self._time.after(self.rng.uniform(0.0, 10.0), partial(self._seats.stop, kind, True))
        return f"the user stops the run{', at once' if now else ''}"


_BLOWS: dict[FaultKind, Callable[[Blow], str]] = {
    FaultKind.CRASH: Blow.crash,
    FaultKind.TEMPLATE: Blow.kill_template,
    FaultKind.LOSS: Blow.lose,
    FaultKind.RACK: Blow.lose_rack,
    FaultKind.FREEZE: Blow.freeze,
    FaultKind.STUCK: Blow.stick,
    FaultKind.PREEMPT: Blow.preempt,
    FaultKind.NOTICE: Blow.threaten,
    FaultKind.FLAP: Blow.flap,
    FaultKind.DRIVER: Blow.replace_driver,
    FaultKind.POWER: Blow.cut_power,
    FaultKind.CLOCK: Blow.suspend,
    FaultKind.STOP: Blow.stop,
    FaultKind.HANG: Blow.hang,
    FaultKind.RETURN: Blow.come_back,
}
