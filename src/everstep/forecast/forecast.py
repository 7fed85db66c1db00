"""The brain on a modelled cluster, for weeks of virtual time: it is told what fails, and its commands take as
long as such things take.

Between two faults nothing is simulated: steps and checkpoints are counted in closed form (``training``).
One worker a host: what a host's accelerators do is part of the time that a step takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.commands import AskReason, Rung
from everstep.control.controller import Controller
from everstep.control.deadlines import Deadlines
from everstep.control.failures import Failure, Kind
from everstep.control.ledger import Category
from everstep.control.reports import Part
from everstep.control.settings import Settings
from everstep.control.table import Phase
from everstep.forecast.outages import Outage, drawn, load_trace, with_notices
from everstep.forecast.pieces import PiecewiseLedger
from everstep.forecast.question import ForecastQuestion, Policy
from everstep.forecast.training import Cadence, Stretch
from everstep.sim.brain.clock import EventClock
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, HostView

_RESERVE_S = 0.01
_TOGETHER_S = 1.0
"""Hosts that come within this time are told of together."""


class Crew:
    """The hosts of one replica group, or of all: what they do, and since when."""

    def __init__(self, hosts: int, category: Category, since: float) -> None:
        self.hosts = hosts
        self.category = category
        self.since = since
        self.stretch: Stretch | None = None
        """While it trains."""

    def turn(self, category: Category, now: float, ledger: PiecewiseLedger) -> None:
        assert self.stretch is None, "what trains is cut off first"
        ledger.charge(self.category, self.hosts, self.since, now)
        self.category, self.since = category, now


class Forecast:
    def __init__(
        self,
        question: ForecastQuestion,
        policy: Policy,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        self.question = question
        self.policy = policy
        self.clock = EventClock()
        self.ledger = PiecewiseLedger(question.hosts, question.seconds)
        self.rungs: Counter[Rung] = Counter()
        self.causes: Counter[str] = Counter()
        self.lost_s = 0.0
        """Of training that had to be done again."""
        self.recoveries: list[float] = []
        """Seconds from a fault to the first new step."""
        self.events = 0
        self._progress = progress
        self._cadence = Cadence(question.step_s, question.checkpoint_every_s, question.checkpoint_cost_s)
        self._eager = Cadence(question.step_s, question.step_s, question.checkpoint_cost_s)
        self._asked = AskReason.NONE
        least = question.slices if question.min_slices is None else question.min_slices
        self._brain = Controller(
            Settings(
                workers_min=least * question.hosts_per_slice,
                workers_max=question.hosts,
                group_size=question.hosts_per_slice if question.replica_groups else None,
                max_failures=-1,
                deadlines=Deadlines(
                    capacity_log_s=question.seconds,  # nobody reads what it waits for
                    # What takes as long as it was said to take isn't late.
                    prepare_s=max(300.0, 2 * policy.phases.prepare_s),
                    start_s=max(120.0, 2 * policy.phases.start_s),
                    kill_s=max(10.0, 2 * policy.phases.stop_s),
                ),
            )
        )
        self._views: dict[HostId, HostView] = {}
        self._places: dict[int, list[Assignment]] = {}
        """By replica group."""
        self._at: dict[HostId, int] = {}
        """The replica group on a host."""
        self._crews: dict[int, Crew] = {}
        self._absent = Crew(question.hosts, Category.RESTART, 0.0)
        """Hosts that the job wants and doesn't have."""
        self._generations: dict[int, int] = {}
        self._stages: dict[int, Phase] = {}
        self._timers: dict[tuple[e.TimerName, int], int] = {}
        self._timers_set = 0
        self._announcing = False
        self._down_since: float | None = None

    # ------------------------------------------------------------------ from beginning to end

    def run(self) -> None:
        question = self.question
        self._outages = self._what_happens()
        self._next_outage()
        self.clock.at(0.0, self._open)
        self.clock.run(question.seconds, most=None)
        for crew in (*self._crews.values(), self._absent):
            self._cut_off(crew, question.seconds, kept=True)
            crew.turn(crew.category, question.seconds, self.ledger)
        self._progress(question.seconds)

    def _what_happens(self) -> Iterator[Outage]:
        question = self.question
        if question.trace is not None:
            told = load_trace(question.trace)
            for outage in told:
                if outage.kind == "back" and outage.at == 0.0:
                    self._add(outage.host, outage.host, 0)
            return iter(with_notices((o for o in told if (o.kind, o.at) != ("back", 0.0)), question.notice_s))
        for number in range(question.slices + question.spares):
            for index in range(question.hosts_per_slice):
                self._add(f"slice-{number}/{index}", f"slice-{number}", index)
        return drawn(question, list(self._views)) if question.mtbf_h is not None else iter(())

    def _add(self, host: HostId, name: str, index: int) -> None:
        self._views[host] = HostView(host, name, index, 1, self.question.hosts_per_slice)

    def _open(self) -> None:
        self._tell(e.CapacityChanged(at=0.0, hosts=tuple(self._views.values())))
        self._tell(e.RunOpened(at=0.0))

    def _next_outage(self) -> None:
        outage = next(self._outages, None)
        if outage is not None and outage.at < self.question.seconds:
            self.clock.at(outage.at, partial(self._strike, outage))

    def _strike(self, outage: Outage) -> None:
        self._progress(self.clock.now)
        match outage.kind:
            case "crash":
                self._crash(outage.host)
            case "lost":
                self._lose(outage.host)
            case "back":
                self._return(outage.host)
            case _:
                if self.policy.hears_notices:
                    now = self.clock.now
                    self._tell(e.PreemptionNotice(at=now, host=outage.host, deadline=outage.deadline))
        self._next_outage()

    # ------------------------------------------------------------------ what fails, and what comes back

    def _crash(self, host: HostId) -> None:
        """A worker dies; with nothing training there, nothing does."""
        group = self._at.get(host)
        if group is None or self._crews[group].stretch is None:
            return
        self._stand_still(group)
        place = next(a for a in self._places[group] if a.host == host)
        failure = Failure(Kind.EXCEPTION, self.clock.now, "a worker died", rank=place.rank, host=host)
        event = e.WorkerFailed(
            at=0.0,
            epoch=self._brain.epoch,
            generation=self._generations[group],
            rank=place.rank,
            failure=failure,
        )
        self.causes["worker"] += 1
        self.clock.after(self.policy.phases.detect_s, partial(self._tell_now, event))

    def _lose(self, host: HostId) -> None:
        view = self._views[host]
        if not view.alive:
            return
        self._views[host] = HostView(host, view.slice, view.index, 1, view.hosts_in_slice, alive=False)
        group = self._at.get(host)
        if group is not None and group in self._crews:
            self.causes["host"] += 1
            self._stand_still(group)
        failure = Failure(Kind.HOST_LOST, self.clock.now, "the host is gone", host=host)
        event = e.HostLost(at=0.0, host=host, failure=failure)
        self.clock.after(self.policy.phases.detect_host_s, partial(self._tell_now, event))

    def _return(self, host: HostId) -> None:
        old = self._views.get(host)
        self._add(host, old.slice if old is not None else host, old.index if old is not None else 0)
        if not self._announcing:
            self._announcing = True
            self.clock.after(max(_TOGETHER_S, self.policy.phases.detect_host_s), self._announce)

    def _announce(self) -> None:
        self._announcing = False
        self._tell(e.CapacityChanged(at=self.clock.now, hosts=tuple(self._views.values())))

    def _stand_still(self, group: int) -> None:
        """One of the group is gone: its peers wait in a collective until somebody notices."""
        crew = self._crews[group]
        if crew.stretch is None:
            return
        self._down_since = self.clock.now if self._down_since is None else self._down_since
        self._report(group)
        others = any(other.stretch is not None for number, other in self._crews.items() if number != group)
        self._cut_off(crew, self.clock.now, kept=others)
        crew.category, crew.since = Category.DETECT, self.clock.now

    def _cut_off(self, crew: Crew, now: float, kept: bool) -> None:
        if crew.stretch is not None:
            self.lost_s += crew.stretch.cut_off(now, self.ledger, kept)
            crew.stretch = None
            crew.category, crew.since = Category.RESTART, now

    def _report(self, group: int) -> None:
        """Tell of the newest checkpoint, if there is one that has not been told of."""
        stretch = self._crews[group].stretch
        if stretch is None:
            return
        stretch.catch_up(self.clock.now, self.ledger)
        if not stretch.untold:
            return
        stretch.untold = False
        folder = f"e{self._brain.epoch}-g{group}.{self._generations[group]}-k{stretch.saved}"
        # Who has something to bring comes last: then there is nothing to collect before.
        for place in reversed(self._places[group]):
            parts = (Part(stretch.saved, folder, held=True),) if place.group_rank == 0 else ()
            self._tell(
                e.Reported(
                    at=self.clock.now,
                    epoch=self._brain.epoch,
                    generation=self._generations[group],
                    rank=place.rank,
                    upto=stretch.saved,
                    parts=parts,
                )
            )

    # ------------------------------------------------------------------ the brain

    def _tell_now(self, event: e.HostLost | e.WorkerFailed) -> None:
        self._tell(msgspec.structs.replace(event, at=self.clock.now))

    def _tell(self, event: e.AnyEvent) -> None:
        self.events += 1
        commands = self._brain.handle(event)
        if commands:
            self._carry_out(commands)
        if self._brain.run.restarts:
            self._see_stages()

    def _carry_out(self, commands: list[c.AnyCommand]) -> None:
        prepared: list[HostId] = []
        stopped: list[c.StopWorkers] = []
        for command in commands:
            match command:
                case c.SetTimer():
                    self._set_timer(command)
                case c.CancelTimer():
                    self._timers.pop((command.timer, command.key), None)
                case c.StopWorkers():
                    stopped.append(command)
                case c.PrepareHost():
                    prepared.append(command.host)
                case c.Reserve():
                    granted = e.Reserved(at=self.clock.now + _RESERVE_S, reservation=command.reservation)
                    self.clock.after(_RESERVE_S, partial(self._tell, granted))
                case c.StartWorkers():
                    self._start(command)
                case c.AskCheckpoint():
                    self._ask(command.reason)
                case c.CommitCheckpoint():
                    folder = command.checkpoint.folder
                    committed = e.CheckpointCommitted(at=self.clock.now, folder=folder)
                    self.clock.after(0.0, partial(self._tell, committed))
                case c.GroupStarted():
                    self._started(command)
                case _:
                    pass
        if prepared:
            self.clock.after(self.policy.phases.prepare_s, partial(self._prepared, prepared))
        if stopped:
            self._stop(stopped)

    def _set_timer(self, command: c.SetTimer) -> None:
        self._timers_set += 1
        name = (command.timer, command.key)
        self._timers[name] = self._timers_set
        self.clock.at(command.at, partial(self._fire, name, self._timers_set))

    def _fire(self, name: tuple[e.TimerName, int], number: int) -> None:
        if self._timers.get(name) == number:
            del self._timers[name]
            self._tell(e.TimerFired(at=self.clock.now, timer=name[0], key=name[1]))

    def _see_stages(self) -> None:
        """Whoever is being restarted waits for capacity, or restarts."""
        for restart in self._brain.run.restarts:
            if self._stages.get(restart.key) is restart.stage:
                continue
            self._stages[restart.key] = restart.stage
            category = Category.WAITING if restart.stage is Phase.WAITING else Category.RESTART
            crews = self._crews.values() if restart.full else [self._crews[g] for g in restart.groups]
            for crew in crews:
                if crew.stretch is None and crew.category is not Category.RESTORE:
                    crew.turn(category, self.clock.now, self.ledger)
            if not self._crews:
                self._absent.turn(category, self.clock.now, self.ledger)

    # ------------------------------------------------------------------ what the brain wants done

    def _prepared(self, hosts: Iterable[HostId]) -> None:
        for host in hosts:
            if self._views[host].alive:
                self._tell(e.HostPrepared(at=self.clock.now, host=host))

    def _stop(self, commands: list[c.StopWorkers]) -> None:
        now = self.clock.now
        for group in {self._at[command.host] for command in commands}:
            crew = self._crews[group]
            if crew.stretch is not None:
                self._down_since = now if self._down_since is None else self._down_since
                self._cut_off(crew, now, kept=False)
            else:
                crew.turn(Category.RESTART, now, self.ledger)
        self.clock.after(self.policy.phases.stop_s, partial(self._gone, commands))

    def _gone(self, commands: list[c.StopWorkers]) -> None:
        for command in commands:
            if self._views[command.host].alive:
                self._tell(
                    e.WorkersGone(
                        at=self.clock.now,
                        host=command.host,
                        epoch=command.epoch,
                        generation=command.generation,
                        ranks=command.ranks,
                    )
                )

    def _start(self, command: c.StartWorkers) -> None:
        now = self.clock.now
        if command.full:
            for crew in self._crews.values():
                self._cut_off(crew, now, kept=False)
                crew.turn(Category.RESTART, now, self.ledger)
            self._absent.turn(Category.WAITING, now, self.ledger)
            self._absent.hosts = self.question.hosts - command.assignments[0].world_size
            self._crews = {
                group.number: Crew(len(group.ranks), Category.WAITING, now)
                for group in self._brain.groups.values()
                if group.nowhere
            }
            self._places.clear()
        places: dict[int, list[Assignment]] = {}
        for place in command.assignments:
            places.setdefault(place.group_id, []).append(place)
        self._places.update(places)
        self._generations.update(command.generations)
        for group, found in places.items():
            if group in self._crews:
                self._crews[group].turn(Category.RESTART, now, self.ledger)
            else:
                self._crews[group] = Crew(len(found), Category.RESTART, now)
        self._at = {a.host: group for group, found in self._places.items() for a in found}
        self.clock.after(self.policy.phases.start_s, partial(self._ready, command))

    def _ready(self, command: c.StartWorkers) -> None:
        """All have met, if all are there; otherwise they wait for each other until they are stopped."""
        if not all(self._views[place.host].alive for place in command.assignments):
            return
        generations = dict(command.generations)
        for place in command.assignments:
            self._tell(
                e.WorkerReady(
                    at=self.clock.now,
                    epoch=command.epoch,
                    generation=generations[place.group_id],
                    rank=place.rank,
                )
            )

    def _started(self, command: c.GroupStarted) -> None:
        self.rungs[command.rung] += 1
        crews = [self._crews[group] for group, _ in command.generations]
        for crew in crews:
            crew.turn(Category.RESTORE, self.clock.now, self.ledger)
        self.clock.after(self.policy.phases.restore_s, partial(self._train, crews))

    def _train(self, crews: list[Crew]) -> None:
        now = self.clock.now
        current = list(self._crews.values())
        for crew in crews:
            if crew.category is Category.RESTORE and crew in current:
                crew.turn(Category.STEP, now, self.ledger)
                crew.stretch = Stretch(self._cadence, now, crew.hosts)
        if self._down_since is not None and all(crew.stretch is not None for crew in current):
            self.recoveries.append(now - self._down_since)
            self._down_since = None

    # ------------------------------------------------------------------ checkpoints that are asked for

    def _ask(self, reason: AskReason) -> None:
        self._asked = reason
        now = self.clock.now
        if reason is AskReason.NONE:
            for crew in self._crews.values():
                if crew.stretch is not None and crew.stretch.cadence is not self._cadence:
                    crew.stretch.hurry(self._cadence, now, self.ledger)
            return
        for group, crew in self._crews.items():
            if crew.stretch is not None:
                if self.policy.checkpoints_on_demand:
                    done = crew.stretch.save_now(now, self.ledger)
                    self.clock.at(done, partial(self._saved, group, crew.stretch))
                else:
                    crew.stretch.catch_up(now, self.ledger)
                    self.clock.at(
                        crew.stretch.next_checkpoint(), partial(self._save_due, group, crew.stretch)
                    )

    def _saved(self, group: int, stretch: Stretch) -> None:
        crew = self._crews.get(group)
        if crew is not None and crew.stretch is stretch:
            stretch.catch_up(self.clock.now - self._cadence.cost_s, self.ledger)
            stretch.saved_until(self.clock.now, self.ledger)
            if self._asked is AskReason.PREEMPTION:
                # ``should_checkpoint()`` is true until the slice is left: a loop that asks saves every step.
                stretch.hurry(self._eager, self.clock.now, self.ledger)
            self._report(group)

    def _save_due(self, group: int, stretch: Stretch) -> None:
        crew = self._crews.get(group)
        if crew is not None and crew.stretch is stretch:
            self._report(group)
