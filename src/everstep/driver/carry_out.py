"""The controller's commands, as calls of engine, workers and storage."""

from __future__ import annotations

import asyncio
from typing import assert_never

import msgspec

from everstep.control import commands as c
from everstep.driver.checkpointing import Checkpointing
from everstep.driver.driven import DrivenRun
from everstep.driver.housekeeping import FLUSH_S
from everstep.driver.incoming import Incoming
from everstep.driver.job import Specs
from everstep.driver.stacks import stacks_page
from everstep.driver.timers import Timers
from everstep.driver.workers import Workers
from everstep.errors import StorageError
from everstep.journal import records
from everstep.protocol import wire, worker_messages
from everstep.storage import attempts
from everstep.torchft.placement import LighthousePlacement


class CarryOut:
    def __init__(
        self,
        run: DrivenRun,
        workers: Workers,
        checkpoints: Checkpointing,
        incoming: Incoming,
        lighthouse: LighthousePlacement | None,
    ) -> None:
        self._run = run
        self._workers = workers
        self._checkpoints = checkpoints
        self._incoming = incoming
        self._lighthouse = lighthouse
        self._timers = Timers(run)

    def command(self, command: c.AnyCommand) -> None:
        engine = self._run.engine
        match command:
            case c.SetTimer():
                self._timers.set(command)
            case c.CancelTimer():
                self._timers.cancel(command.timer, command.key)
            case c.Reserve():
                engine.reserve(command.reservation, command.slices)
            case c.Release():
                self._release(command)
            case c.RequestCapacity():
                engine.request_capacity(command.workers)
            case c.PrepareHost():
                engine.send(command.host, self._run.job.preparation(self._run.precedence, engine))
            case c.RetireHost():
                self._workers.retired(command.host)
                engine.retire(command.host)
            case c.StartWorkers():
                self._start_workers(command)
            case c.StopWorkers():
                self._stop_workers(command)
            case c.KeepSnapshot():
                self._keep_snapshot(command)
            case c.CopySnapshot():
                engine.send(command.to, self._run.job.copy_slot(command, self._run.precedence, engine))
            case c.ExamineWorkers():
                engine.send(command.host, wire.Examine(self._run.precedence, command.epoch, command.check))
            case c.KeepStacks():
                self._run.keep_file(command.name, stacks_page(command).encode(), "stacks of workers")
            case c.AskCheckpoint():
                self._workers.ask(command.reason)
            case c.CommitCheckpoint():
                self._run.spawn(self._checkpoints.commit(command))
            case c.DiscardCheckpoint():
                self._checkpoints.commits.discard(command.folder)
            case c.EndRun():
                self._run.outcome.ended(command)
            case c.Recovered() if not self._workers.have_reported():
                self._run.record(records.RecoveredWithoutReport(**msgspec.structs.asdict(command)))
            case c.Record():
                self._run.record(command)
            case _:
                assert_never(command)

    def _start_workers(self, command: c.StartWorkers) -> None:
        self._workers.write_places(command.assignments, others_stay=not command.full)
        if self._workers.begin(command) and self._lighthouse is not None:
            self._lighthouse.renew()
        snapshot_every = self._workers.pace.cadence.reports
        specs = self._run.job.specs(command, self._run.engine, snapshot_every)
        self._run.spawn(self._start_once_recorded(command, specs))

    def _keep_snapshot(self, command: c.KeepSnapshot) -> None:
        self._workers.send(
            command.epoch, list(command.ranks), worker_messages.Kept(command.kept, command.upto)
        )
        for host in command.hosts:
            self._run.engine.send(host, wire.KeepSlots(self._run.precedence, command.kept))

    def _release(self, command: c.Release) -> None:
        slices = self._incoming.slices
        self._incoming.given_back(host for host, name in slices.items() if name in command.slices)
        self._run.engine.release(command.slices)

    async def _start_once_recorded(self, command: c.StartWorkers, specs: Specs) -> None:
        """The attempt's number is on record, and noted beside the journal, before anything can be named
        after it. Storage that is away is waited for; the controller knows for how long.
        """
        while specs:
            try:
                await asyncio.gather(
                    self._run.lease.journal.flush(),
                    attempts.note(self._run.store, command.epoch, command.generations),
                )
                break
            except StorageError:
                await asyncio.sleep(FLUSH_S)
                specs = {host: some for host, every in specs.items() if (some := self._workers.wanted(every))}
        engine = self._run.engine
        sources = {rank: [engine.source(host) for host in hosts] for rank, hosts in command.sources}
        for host, every in specs.items():
            if some := self._workers.wanted(every):
                engine.send(host, wire.Start(self._run.precedence, some, sources))

    def _stop_workers(self, command: c.StopWorkers) -> None:
        ranks = sorted(command.ranks)
        stop = wire.Stop(self._run.precedence, command.epoch, command.generation, ranks, command.grace_s)
        self._run.engine.send(command.host, stop)
        self._workers.stopping(command)
