"""The controller's commands on the modelled cluster: each takes as long as the policy's phases say, then its
event follows.

Failures of single commands are left out: a host is lost or it carries out its commands, and every reservation
and every commit succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller
from everstep.forecast.checkpoints import CrewCheckpoints
from everstep.forecast.crews import Crew, Crews
from everstep.forecast.figures import Figures
from everstep.forecast.hosts import ModelledHosts
from everstep.forecast.question import Phases
from everstep.sim.time import VirtualTime
from everstep.topology.slices import HostId

_RESERVE_S = 0.01


class TimedCommands:
    def __init__(
        self,
        phases: Phases,
        controller: Controller,
        hosts: ModelledHosts,
        crews: Crews,
        checkpoints: CrewCheckpoints,
        figures: Figures,
        clock: VirtualTime,
        emit: Callable[[e.Event], None],
    ) -> None:
        self._phases = phases
        self._controller = controller
        self._hosts = hosts
        self._crews = crews
        self._checkpoints = checkpoints
        self._figures = figures
        self._clock = clock
        self._emit = emit
        self._timers = VirtualTimers(clock, emit)

    def carry_out(self, commands: list[c.AnyCommand]) -> None:
        """All that one event led to. What is stopped together is gone together, and hosts that are prepared
        together are ready together.
        """
        prepared: list[HostId] = []
        stopped: list[c.StopWorkers] = []
        for command in commands:
            match command:
                case c.SetTimer():
                    self._timers.set(command)
                case c.CancelTimer():
                    self._timers.cancel(command)
                case c.StopWorkers():
                    stopped.append(command)
                case c.PrepareHost():
                    prepared.append(command.host)
                case c.Reserve():
                    self._reserve(command)
                case c.StartWorkers():
                    self._start(command)
                case c.AskCheckpoint():
                    self._checkpoints.ask(command.reason)
                case c.CommitCheckpoint():
                    self._commit(command)
                case c.GroupStarted():
                    self._restore(command)
                case _:
                    pass  # takes no time, and nothing here depends on it
        if prepared:
            self._clock.after(self._phases.prepare_s, partial(self._prepared, prepared))
        if stopped:
            self._stop(stopped)

    def _reserve(self, command: c.Reserve) -> None:
        at = self._clock.now + _RESERVE_S
        self._clock.at(at, partial(self._emit, e.Reserved(at=at, reservation=command.reservation)))

    def _commit(self, command: c.CommitCheckpoint) -> None:
        """At once: what that takes is part of what a checkpoint costs."""
        now = self._clock.now
        committed = e.CheckpointCommitted(at=now, folder=command.checkpoint.folder)
        self._clock.at(now, partial(self._emit, committed))

    def _prepared(self, hosts: list[HostId]) -> None:
        for host in filter(self._hosts.alive, hosts):
            self._emit(e.HostPrepared(at=self._clock.now, host=host))

    def _stop(self, commands: list[c.StopWorkers]) -> None:
        groups = {self._crews.places.group_on[command.host] for command in commands}
        self._crews.stop(groups, self._clock.now)
        self._clock.after(self._phases.stop_s, partial(self._gone, commands))

    def _gone(self, commands: list[c.StopWorkers]) -> None:
        for command in commands:
            if self._hosts.alive(command.host):
                self._emit(
                    e.WorkersGone(
                        at=self._clock.now,
                        host=command.host,
                        epoch=command.epoch,
                        generation=command.generation,
                        ranks=command.ranks,
                    )
                )

    def _start(self, command: c.StartWorkers) -> None:
        self._crews.start(command, self._controller.groups.values(), self._clock.now)
        self._clock.after(self._phases.start_s, partial(self._ready, command))

    def _ready(self, command: c.StartWorkers) -> None:
        """The rendezvous is complete if no host was lost; otherwise the workers wait in it until they are
        stopped.
        """
        if not all(self._hosts.alive(place.host) for place in command.assignments):
            return
        generations = dict(command.generations)
        for place in command.assignments:
            self._emit(
                e.WorkerReady(
                    at=self._clock.now,
                    epoch=command.epoch,
                    generation=generations[place.group_id],
                    rank=place.rank,
                )
            )

    def _restore(self, command: c.GroupStarted) -> None:
        self._figures.restarts[command.rung] += 1
        crews, now = [self._crews[group] for group, _ in command.generations], self._clock.now
        from_memory = self._crews.restore(crews, now)
        seconds = self._phases.restore_memory_s if from_memory else self._phases.restore_s
        self._clock.after(seconds, partial(self._train, crews, now))

    def _train(self, crews: list[Crew], since: float) -> None:
        self._crews.train(crews, since, self._clock.now)


class VirtualTimers:
    """The controller's, by name and key. One that is set again is moved."""

    def __init__(self, clock: VirtualTime, emit: Callable[[e.Event], None]) -> None:
        self._clock = clock
        self._emit = emit
        self._due: dict[tuple[e.TimerName, int], int] = {}
        """The number of the latest setting: virtual time forgets nothing, so earlier ones are ignored."""
        self._settings = 0

    def set(self, command: c.SetTimer) -> None:
        self._settings += 1
        self._due[command.timer, command.key] = self._settings
        self._clock.at(command.at, partial(self._fire, command, self._settings))

    def cancel(self, command: c.CancelTimer) -> None:
        self._due.pop((command.timer, command.key), None)

    def _fire(self, command: c.SetTimer, number: int) -> None:
        if self._due.get((command.timer, command.key)) == number:
            del self._due[command.timer, command.key]
            self._emit(e.TimerFired(at=self._clock.now, timer=command.timer, key=command.key))
