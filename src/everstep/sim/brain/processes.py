"""What workers do in the modelled world: start, meet, step, save, fail, break each other, and stop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from everstep.control import commands as c, events as e
from everstep.control.commands import AskReason
from everstep.control.failures import Failure, Kind
from everstep.control.reports import Part
from everstep.control.snapshots import At
from everstep.control.vitals import Finding, StackPlace, Stage, Vitals
from everstep.sim.brain.machines import GroupKey, Host, Life, ModelWorker

if TYPE_CHECKING:
    from everstep.sim.brain.world import World


_PRESENT = (Life.TRAINING, Life.RETURNED)


class Processes:
    def __init__(self, world: World) -> None:
        self._world = world
        self.watch: Callable[[Host], None] = lambda host: None
        """Told of every host on which a process begins."""

    def members(self, key: GroupKey) -> list[tuple[Host, ModelWorker]]:
        """The workers of a group's incarnation whose process is there."""
        hosts = self._world.hosts.values()
        return [(h, w) for h in hosts for w in h.workers if w.key == key and w.life is not Life.DEAD]

    # ------------------------------------------------------------------ starting

    def start(self, command: c.StartWorkers) -> None:
        world = self._world
        step = world.storage.steps_of[command.checkpoint] if command.checkpoint else 0
        peers = [w for h in world.hosts.values() for w in h.workers if w.life is Life.TRAINING]
        # A group that is replaced takes its state from a peer.
        step = max([step, *(w.step for w in peers if w.epoch == command.epoch)])
        generations = dict(command.generations)
        damaged = command.checkpoint if command.full and command.checkpoint in world.storage.damaged else None
        for place in command.assignments:
            host = world.hosts[place.host]
            worker = ModelWorker(place, command.epoch, generations[place.group_id], step, damaged)
            world.to_host(host, partial(self._spawn, host, worker, command.snapshot))

    def _spawn(self, host: Host, worker: ModelWorker, snapshot: At | None) -> None:
        world = self._world
        host.workers.append(worker)
        self.watch(host)
        if snapshot is not None:
            worker.damaged = None  # storage isn't read
            world.memory.restore(host, worker, snapshot)
        if not host.template or world.chance(world.scenario.failed_spawn):
            world.fault()
            self._fail(host, worker, Kind.START, "fork failed")
            return
        world.from_host(host, worker.spawned())
        worker.life = Life.JOINING
        if world.chance(world.scenario.failed_rendezvous):
            world.fault()
            world.clock.after(world.between(0.0, 2.0), partial(self._die_joining, host, worker))
            return
        peers = self.members(worker.key)
        if len(peers) == worker.place.group_size and all(w.life is Life.JOINING for _, w in peers):
            for where, peer in peers:
                world.clock.after(world.between(0.01, 0.5), partial(self._ready, where, peer))
            world.clock.after(world.between(0.5, 1.0), partial(self._tick, worker.key))

    def _die_joining(self, host: Host, worker: ModelWorker) -> None:
        if worker.life is Life.JOINING:
            self.crash(host, worker, Kind.SIGNAL)

    def _ready(self, host: Host, worker: ModelWorker) -> None:
        if worker.life is not Life.JOINING or worker.stuck:
            return
        if host.frozen:
            host.held_back.append(partial(self._ready, host, worker))
            return
        worker.life = Life.TRAINING
        worker.moved = self._world.clock.now
        self._world.from_host(host, worker.ready())
        if worker.damaged is not None:
            self._world.fault()
            self._world.from_host(host, e.CheckpointDamaged(at=0.0, folder=worker.damaged))
            self._fail(host, worker, Kind.EXCEPTION, f"{worker.damaged} is damaged")

    # ------------------------------------------------------------------ training

    def _tick(self, key: GroupKey) -> None:
        """One step of a group: all of its workers, or none."""
        world = self._world
        peers = self.members(key)
        if not peers or len(peers) < peers[0][1].place.group_size or any(w.stuck or w.hung for _, w in peers):
            return  # it will not step again
        trains = all(w.life is Life.TRAINING and not h.frozen for h, w in peers)
        if trains and not self._waits_for_snapshot(peers):
            step = peers[0][1].step + 1
            saves = step % world.scenario.checkpoint_every == 0 or world.asked is not AskReason.NONE
            for host, worker in peers:
                self._step(host, worker, step, saves)
            if step >= world.scenario.steps:
                for host, worker in peers:
                    self._return(host, worker)
                return
        world.clock.after(world.scenario.step_s * world.between(0.9, 1.1), partial(self._tick, key))

    def _waits_for_snapshot(self, peers: list[tuple[Host, ModelWorker]]) -> bool:
        """A rank that doesn't know what becomes of its last snapshot takes no other, while there is somebody
        to tell it.
        """
        return not self._world.undriven and any(worker.open is not None for _, worker in peers)

    def _step(self, host: Host, worker: ModelWorker, step: int, saves: bool) -> None:
        """Take a snapshot, which takes a while, and report."""
        world = self._world
        last = step >= world.scenario.steps
        if not world.scenario.snapshots or last or worker.open is not None or world.chance(0.05):
            self._report(host, worker, step, saves)
            return
        slot = world.memory.begin(host, worker)
        pause = world.between(0.0, 0.3 * world.scenario.step_s)
        world.clock.after(pause, partial(self._copied, host, worker, slot, step, saves))

    def _copied(self, host: Host, worker: ModelWorker, slot: int, step: int, saves: bool) -> None:
        if worker.life is not Life.TRAINING or not host.alive:
            return  # killed in the middle of it
        if host.frozen:
            host.held_back.append(partial(self._copied, host, worker, slot, step, saves))
            return
        at = At(worker.epoch, worker.reports + 1)
        self._world.memory.finish(host, worker, slot, at, step)
        self._report(host, worker, step, saves)

    def _return(self, host: Host, worker: ModelWorker) -> None:
        worker.life = Life.RETURNED
        self._world.from_host(host, worker.returned(), 0.02)
        if self._world.scenario.says_gone:
            self._say_gone(host, worker)

    def _report(self, host: Host, worker: ModelWorker, step: int, saves: bool) -> None:
        world, scenario = self._world, self._world.scenario
        worker.step = step
        worker.moved = world.clock.now
        worker.reports += 1
        index = worker.reports
        copied = (index,) if worker.open == At(worker.epoch, index) else ()
        latency = world.between(0.001, 0.1)
        if not saves or (worker.place.group_rank != 0 and world.rng.random() < scenario.partless):
            world.from_host(host, worker.reported(index, copied=copied), latency)
            return
        folder = f"e{worker.epoch}-g{worker.place.group_id}.{worker.generation}-k{index}"
        part = Part(index, folder, held=world.asked is not AskReason.NONE)
        world.storage.expect(part, worker.rank, step)
        fails = world.chance(scenario.failed_upload)
        if world.rng.random() < scenario.asynchronous:
            worker.owed.add(index)
            world.from_host(host, worker.reported(index, owed=(index,), copied=copied), latency)
            world.clock.after(world.between(0.1, 20.0), partial(self._uploaded, host, worker, part, fails))
        elif fails:
            worker.spoilt.add(index)
            world.from_host(host, worker.upload_failed(index))
            world.from_host(host, worker.reported(index, copied=copied), latency)
        else:
            worker.unacknowledged[index] = part
            world.from_host(host, worker.reported(index, parts=(part,), copied=copied), latency)

    def _uploaded(self, host: Host, worker: ModelWorker, part: Part, fails: bool) -> None:
        """The agent uploads: it does so also when the worker is dead."""
        if not host.alive or not host.agent:
            return
        if host.frozen:
            host.held_back.append(partial(self._uploaded, host, worker, part, fails))
            return
        worker.owed.discard(part.index)
        if fails:
            worker.spoilt.add(part.index)
            self._world.from_host(host, worker.upload_failed(part.index))
        else:
            worker.unacknowledged[part.index] = part
            self._world.from_host(host, worker.reported(worker.reports, parts=(part,)))

    def say_again(self, host: Host, worker: ModelWorker) -> None:
        """Tell a new driver what the one before may not have dealt with."""
        world = self._world
        for index in sorted(worker.spoilt):
            world.from_host(host, worker.upload_failed(index))
        parts = tuple(part for _, part in sorted(worker.unacknowledged.items()))
        copied = (worker.open.report,) if worker.open is not None else ()
        world.from_host(host, worker.reported(worker.reports, tuple(sorted(worker.owed)), parts, copied))
        if worker.life is Life.RETURNED:
            world.from_host(host, worker.returned())

    # ------------------------------------------------------------------ being watched

    def look(self) -> None:
        """Agents tell of workers that are quiet, at work or not."""
        world = self._world
        for host in world.hosts.values():
            if not host.agent:
                continue
            found = [self._vitals(w) for w in host.workers if w.life is Life.TRAINING and not w.stopping]
            late = tuple(vitals for vitals in found if vitals.quiet_s >= world.scenario.deadlines.hang_s / 2)
            if late:
                epoch = max(w.epoch for w in host.workers if w.life is Life.TRAINING)
                world.from_host(host, e.WorkersQuiet(at=0.0, host=host.id, epoch=epoch, vitals=late))

    def examine(self, host: Host, command: c.ExamineWorkers) -> None:
        mine = [w for w in host.workers if w.epoch == command.epoch and w.life in _PRESENT]
        if host.agent:
            word = e.WorkersExamined(
                at=0.0,
                host=host.id,
                epoch=command.epoch,
                look=command.look,
                found=tuple(self._find(worker) for worker in mine),
            )
            self._world.from_host(host, word, self._world.between(0.1, 2.0))

    def _find(self, worker: ModelWorker) -> Finding:
        waits = not worker.hung and self._stands_still(worker)
        return Finding(self._vitals(worker), StackPlace.COLLECTIVE if waits else StackPlace.WORKING)

    def _stands_still(self, worker: ModelWorker) -> bool:
        """It hangs, or waits for one of its group that does, or that is gone."""
        return worker.stuck or any(peer.hung for _, peer in self.members(worker.key))

    def _vitals(self, worker: ModelWorker) -> Vitals:
        """A step may take any time, and is work all the while."""
        world = self._world
        quiet = world.clock.now - worker.moved
        trains = Stage.TRAINING if worker.reports else Stage.FIRST_STEP
        return Vitals(
            worker.rank,
            worker.generation,
            Stage.RETURNED if worker.life is Life.RETURNED else trains,
            quiet,
            quiet if self._stands_still(worker) else 0.0,
            quiet if self._stands_still(worker) else 0.0,
            0.0,
            min(quiet, world.scenario.step_s),
            0.0,
            worker.reports,
            0,
        )

    # ------------------------------------------------------------------ failing

    def crash(self, host: Host, worker: ModelWorker, kind: Kind) -> None:
        if worker.running and host.alive and not host.frozen:
            self._fail(host, worker, kind, "boom")

    def _fail(self, host: Host, worker: ModelWorker, kind: Kind, message: str, echo: bool = False) -> None:
        failure = Failure(kind, self._world.clock.now, message, rank=worker.rank, host=host.id, echo=echo)
        self._world.from_host(host, worker.failed(failure))
        self.end(worker)
        if self._world.scenario.says_gone:
            self._say_gone(host, worker)

    def end(self, worker: ModelWorker) -> None:
        """The process is gone. Collectives of its peers fail after a while, or hang."""
        world = self._world
        was_running = worker.running
        worker.life = Life.DEAD
        if not was_running:
            return
        for host, peer in self.members(worker.key):
            if not peer.running or peer.stuck or peer.life is Life.SPAWNING:
                continue
            peer.stuck = True
            if world.rng.random() < 0.6:
                recognised = world.rng.random() < 0.8
                world.clock.after(world.between(0.001, 3.0), partial(self._echo, host, peer, recognised))

    def _echo(self, host: Host, worker: ModelWorker, recognised: bool) -> None:
        if worker.running and host.alive and not host.frozen:
            self._fail(host, worker, Kind.EXCEPTION, "connection closed by peer", echo=recognised)

    def tire_of_waiting(self, awaited: Host, host: Host, worker: ModelWorker) -> None:
        if awaited.frozen:
            self._echo(host, worker, True)

    # ------------------------------------------------------------------ stopping

    def stop(self, command: c.StopWorkers) -> None:
        host = self._world.hosts[command.host]
        self._world.to_host(host, partial(self._stop, host, command))

    def _stop(self, host: Host, command: c.StopWorkers) -> None:
        mine = [
            w
            for w in host.workers
            if (w.epoch, w.generation) == (command.epoch, command.generation) and w.rank in command.ranks
        ]
        if host.agent and not (host.stuck and any(w.running for w in mine)):
            for worker in mine:
                worker.stopping = True
            world = self._world
            pause = world.between(0.001, 0.05) + command.grace_s * world.rng.random()
            world.clock.after(pause, partial(self._stopped, host, command, mine))

    def _stopped(self, host: Host, command: c.StopWorkers, workers: list[ModelWorker]) -> None:
        if not host.alive:
            return
        if host.frozen:
            host.held_back.append(partial(self._stopped, host, command, workers))
            return
        for worker in workers:
            self.end(worker)
        self._world.from_host(
            host,
            e.WorkersGone(
                at=0.0,
                host=host.id,
                epoch=command.epoch,
                generation=command.generation,
                ranks=command.ranks,
            ),
        )

    def _say_gone(self, host: Host, worker: ModelWorker) -> None:
        word = e.WorkersGone(
            at=0.0,
            host=host.id,
            epoch=worker.epoch,
            generation=worker.generation,
            ranks=frozenset({worker.rank}),
        )
        self._world.from_host(host, word, 0.1)
