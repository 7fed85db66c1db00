"""A run's checkpoints, as its driver has them made: due, committed, validated, retained."""

from __future__ import annotations

import msgspec

from everstep.checkpoint import ReportedCheckpointStatus
from everstep.control import commands as c, events as e
from everstep.control.table import Phase
from everstep.driver.commits import Commits
from everstep.driver.deletions import Deletions
from everstep.driver.driven import DrivenRun
from everstep.driver.states import StatesDue
from everstep.driver.validations import Validations
from everstep.driver.workers import Workers
from everstep.identity import Incarnation
from everstep.journal import records
from everstep.protocol import worker_messages


class Checkpointing:
    def __init__(self, run: DrivenRun, workers: Workers) -> None:
        self._run = run
        self._workers = workers
        config = run.job.run.checkpoint_config
        self.deletions = Deletions(
            run.store,
            run.lease.journal,
            run.history,
            delete_external=config.delete_external,
            storage_options=run.job.run.storage_options,
        )
        self.commits = Commits(
            run.store,
            run.history,
            self.deletions,
            config,
            run.write,
            run.emit,
            run.observer.say,
            run.spawn,
            run.clock,
            run.unsaved,
        )
        self.validations = Validations(
            run.job, run.store, run.history, run.engine.run_side_task, self._validated, run.observer.say
        )
        self._states = StatesDue(config.storage_every_s, workers.talk.synchronized.propose)

    def group_started(self) -> None:
        self._states.restart(self._run.clock.now())

    def look(self) -> None:
        """Whether the workers' state is due to be saved."""
        if self._run.controller.phase is Phase.RUNNING:
            self._states.look(self._run.clock.now())
            self._workers.pace.cadence.look()

    async def commit(self, command: c.CommitCheckpoint) -> None:
        ready = command.checkpoint
        metrics = self._workers.metrics.with_checkpoint(command.group, command.generation, ready.index)
        self.validations.committing.add(ready.folder)
        committed = await self.commits.commit(command, metrics)
        self.validations.committing.discard(ready.folder)
        of = Incarnation(command.epoch, command.group, command.generation)
        kept = self._run.history.checkpoints.get(ready.folder) if committed else None
        if kept is None:  # it can't be committed, or better ones are kept in its place
            self._run.observer.unsaved(of, ready.index)
        else:
            self._run.observer.committed(of, ready.index, kept.address(self._run.store))
            if kept.ref.state:
                self._states.saved()
        if committed:
            self.validations.look()
        if self._run.controller.phase is Phase.RUNNING:
            # Else its ranks are being ended, and stay where they are until then.
            ranks = [rank for rank, _ in ready.parts]
            self._workers.send(
                command.epoch, ranks, worker_messages.CheckpointSettled(ready.folder, ready.index)
            )

    def _validated(self, folder: str, status: ReportedCheckpointStatus, metrics: msgspec.Raw) -> None:
        self.commits.validated(records.Validated(self._run.clock.now(), folder, status.value, metrics))
        self._workers.questions.answer()

    def gone(self, folder: str) -> None:
        """It isn't there now, and nobody gave it up. If it comes back, with a disk that was away, it is one
        of the run's again.
        """
        self._run.history.forget(folder)
        self._run.emit(e.CheckpointGone(at=self._run.clock.now(), folder=folder))
