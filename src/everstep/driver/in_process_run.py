"""A run that is kept by the process that trains: its journal and its checkpoints, with no driver beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from everstep.checkpoint import Checkpoint, ReportedCheckpointStatus as Status
from everstep.control.commands import PhaseChanged
from everstep.control.table import Phase
from everstep.driver.deletions import Deletions
from everstep.driver.questions import all_kept, listing, newest_of
from everstep.driver.repair import Repair
from everstep.driver.scores import Scores, no_longer_kept
from everstep.driver.stalls import Stalls
from everstep.driver.validations import validate_here
from everstep.errors import ConflictingPartsError, StorageError
from everstep.journal import records
from everstep.journal.lease import Lease
from everstep.process.clock import MachineClock
from everstep.protocol.metrics import NO_METRICS
from everstep.saved.checkpoints import CheckpointRef
from everstep.saved.reports import CompleteCheckpoint
from everstep.snapshots.layout import holds_state
from everstep.storage import attempts, checkpoints
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.store import Store

if TYPE_CHECKING:
    from everstep.driver.run import RunSpec


class InProcessRun:
    """Everything is done at once, where it is asked for."""

    def __init__(self, store: Store, lease: Lease, spec: RunSpec, say: Callable[[str], None]) -> None:
        self.folder = store
        self.say = say
        self.history = lease.history
        self.config = spec.run.checkpoint_config
        self.epoch = 0
        self._lease = lease
        self._journal = lease.journal
        self._store = ImmediateStore(store)
        self._scores = Scores(self.config, say)
        self.stalls = Stalls(self.write, lease.history.ledger)
        self._validation = spec.validation
        self._options = spec.run.storage_options
        self._deletions = Deletions(
            self._store,
            lease.journal,
            lease.history,
            delete_external=self.config.delete_external,
            storage_options=spec.run.storage_options,
        )

    def listed(self, what: str) -> bytes:
        if what == "newest":
            return newest_of(self.history, self.folder)
        return listing(all_kept(self.history, self.config), self.folder)

    # ------------------------------------------------------------------ checkpoints

    def commit(self, ready: CompleteCheckpoint, metrics: msgspec.Raw) -> None:
        """Commit it, and have it validated."""
        ref = CheckpointRef(ready.folder, self.epoch, ready.index)
        parts = [part.record for _, part in ready.parts]
        try:
            manifest = complete(checkpoints.commit(self._store, ref, parts, bytes(metrics)))
        except ConflictingPartsError:
            raise
        except StorageError as error:  # as with workers: the one before stays the newest
            self.say(f"checkpoint {ready.folder} can't be committed: {error}; training goes on")
            return
        ref = msgspec.structs.replace(ref, state=holds_state(file.path for file in manifest.files))
        self.write(
            records.Committed.of(time.monotonic(), ref, metrics, manifest.external, manifest.validation)
        )
        complete(self._journal.flush())
        self._validate()
        self._scores.warn_without_score(self.history.checkpoints[ready.folder])

    def retain(self) -> None:
        """Let go of checkpoints that newer ones replace."""
        for folder in no_longer_kept(self.history, self.config):
            self.write(records.Deleted(time.monotonic(), folder))
            self._remove(folder)

    def _validate(self) -> None:
        """What waits for its validation gets it, here and now."""
        for kept in self.history.pending():
            folder, status, found = kept.ref.folder, Status.COMMITTED, NO_METRICS
            if self._validation is not None:
                checkpoint = Checkpoint(kept.address(self._store), storage_options=self._options)
                task = self._validation.task(kept.validation, checkpoint)
                status, found = validate_here(task, folder, self.say)
            self.write(records.Validated(time.monotonic(), folder, status.value, found))

    def _remove(self, folder: str) -> None:
        try:
            complete(self._deletions.remove(folder))
        except StorageError as error:
            self.say(f"{folder} is no longer needed, and can't be removed: {error}")

    def close(self, closed: records.Closed) -> None:
        self.stalls.flush(closed.at, all_=True)
        self.write(closed)
        complete(self._journal.flush())

    def write(self, record: records.AnyRecord) -> None:
        self._journal.append(record)
        self.history.apply(record)

    def put_in_order(self) -> None:
        """As a driver does, before training starts."""
        lease, say = self._lease, self.say
        complete(lease.mend(say))
        repair = Repair(self._store, self.history, self._deletions, self.write, say, MachineClock())
        complete(repair.put_in_order(journal_is_whole=not lease.damage))

    def begin(self, epoch: int) -> None:
        """This attempt's number is never used again, also if nothing comes of it."""
        self.epoch = epoch
        self._validate()
        self.write(PhaseChanged(time.monotonic(), Phase.STARTING.value, epoch))
        self.write(PhaseChanged(time.monotonic(), Phase.RUNNING.value, epoch))
        complete(self._journal.flush())
        complete(attempts.note(self._store, epoch))
