"""The controller of real runs on a modelled cluster, for weeks of virtual time.

The parts are made and connected here, and events reach the controller here. ``hosts`` has what fails and
comes back, ``commands`` what the controller wants done and how long that takes, ``checkpoints`` what is
reported to it of checkpoints, ``crews`` what the hosts do with their time, and ``figures`` the results.
Between two faults nothing is simulated (``training``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep.control import events as e
from everstep.control.controller import Controller
from everstep.control.settings import Settings
from everstep.deadlines import Deadlines
from everstep.forecast.checkpoints import CrewCheckpoints
from everstep.forecast.commands import TimedCommands
from everstep.forecast.crews import Crews
from everstep.forecast.figures import Figures
from everstep.forecast.hosts import ModelledHosts
from everstep.forecast.outages import Outage, cluster
from everstep.forecast.question import ForecastQuestion, Policy
from everstep.forecast.training import Cadence
from everstep.sim.time import VirtualTime


class Forecast:
    def __init__(
        self,
        question: ForecastQuestion,
        policy: Policy,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        self.figures = figures = Figures(question.hosts, question.seconds)
        self._seconds = question.seconds
        self._progress = progress
        self._clock = clock = VirtualTime()
        self._controller = controller = Controller(_settings(question, policy))
        views, self._outages = cluster(question)
        cadence = Cadence(
            question.step_s,
            question.checkpoint_every_s,
            question.checkpoint_cost_s,
            (question.snapshot_every_s or 0.0) if policy.snapshots else 0.0,
            question.snapshot_cost_s,
            None if question.replicated else question.snapshot_copies,
        )
        self._crews = crews = Crews(question.hosts, cadence, figures)
        checkpoints = CrewCheckpoints(
            cadence, policy.checkpoints_on_demand, crews, figures.ledger, clock, self._emit
        )
        self._hosts = hosts = ModelledHosts(views, policy, crews, checkpoints, figures, clock, self._emit)
        self._commands = TimedCommands(
            policy.phases, controller, hosts, crews, checkpoints, figures, clock, self._emit
        )

    def run(self) -> None:
        self._schedule_next_outage()
        self._clock.at(0.0, self._open)
        self._clock.run(self._seconds, most=None)
        self._crews.end(self._seconds)
        self._progress(self._seconds)

    def _open(self) -> None:
        self._hosts.emit_capacity()
        self._emit(e.RunOpened(at=0.0))

    def _schedule_next_outage(self) -> None:
        outage = next(self._outages, None)
        if outage is not None and outage.at < self._seconds:
            self._clock.at(outage.at, partial(self._strike, outage))

    def _strike(self, outage: Outage) -> None:
        self._progress(self._clock.now)
        self._hosts.strike(outage)
        self._schedule_next_outage()

    def _emit(self, event: e.Event) -> None:
        self.figures.events += 1
        commands = self._controller.handle(event)
        if commands:
            self._commands.carry_out(commands)
        if self._controller.restarts:
            self._crews.follow(self._controller.restarts, self._clock.now)


def _settings(question: ForecastQuestion, policy: Policy) -> Settings:
    least = question.slices if question.min_slices is None else question.min_slices
    return Settings(
        workers_min=least * question.hosts_per_slice,
        workers_max=question.hosts,
        group_size=question.hosts_per_slice if question.replica_groups else None,
        max_failures=-1,
        deadlines=Deadlines(
            capacity_log_s=question.seconds,  # nobody reads these lines
            # A phase that takes as long as the question says isn't late.
            prepare_s=max(300.0, 2 * policy.phases.prepare_s),
            start_s=max(120.0, 2 * policy.phases.start_s),
            kill_s=max(10.0, 2 * policy.phases.stop_s),
        ),
    )
