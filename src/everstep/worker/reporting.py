"""A worker's reports: metrics, checkpoints and states, on their way to storage and to the driver."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.checkpoint import Checkpoint, CheckpointUploadMode
from everstep.errors import ConfigError, StorageError
from everstep.health.vitals import StackPlace, Stage
from everstep.process.step_times import StepTimes
from everstep.protocol import framing, wire, worker_messages
from everstep.protocol.metrics import NO_METRICS, encode_metrics, too_large
from everstep.protocol.progress import Progress
from everstep.snapshots.content import Restorable
from everstep.snapshots.keeper import Taken
from everstep.snapshots.reported import ReportedState
from everstep.storage import checkpoints, pending_uploads
from everstep.storage.sources import check_source
from everstep.storage.store import Store
from everstep.worker.datasets import Datasets
from everstep.worker.restoring import Restoring
from everstep.worker.synchronized import SharedValues
from everstep.worker.uploads import UncommittedReports, Uploads, local_folder

if TYPE_CHECKING:
    from everstep.health.stragglers import Pace
    from everstep.saved.reports import Part


class Reporting:
    def __init__(
        self,
        spec: wire.WorkerSpec,
        store: Store,
        send: Callable[[bytes], None],
        uploads: Uploads,
        state: ReportedState,
        values: SharedValues,
        datasets: Callable[[], Datasets],
        restoring: Restoring,
        times: StepTimes,
        progress: Progress,
    ) -> None:
        self._spec = spec
        self._sends_metrics = spec.member.group_rank == 0 or spec.all_metrics
        self._store = store
        self._send = send
        self._uploads = uploads
        self._state = state
        self._values = values
        self._datasets = datasets
        self._restoring = restoring
        self._times = times
        self._progress = progress
        self.index = 0
        """Of the newest report."""
        self.uncommitted = UncommittedReports(spec)
        self._metrics = NO_METRICS
        """Of the newest report of a state."""
        self._pace: Pace | None = None
        """Of the step that the report at hand ends."""

    def report_metrics(self, metrics: dict[str, Any]) -> None:
        """As most reports are made, often one a step: nothing is saved, and nobody is waited for."""
        pace = self._times.end_step(self.index + 1, saves=False)
        raw = self._encoded(metrics)
        self._uploads.raise_failed()
        self.index = index = self.index + 1
        restore_s, at = self._restoring.take_seconds(), time.monotonic()
        self._send(framing.frame(worker_messages.Report(index, raw, restore_s=restore_s, pace=pace, at=at)))
        self._progress.reported()
        self._times.begin_step()

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None,
        dir_name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool | None,
        upload_fn: Callable[[Checkpoint, str], Checkpoint] | None,
        validation: bytes = b"",
        state: Restorable | None = None,
        step: int | None = None,
    ) -> None:
        """With a checkpoint, or a state."""
        self._pace = self._times.end_step(self.index + 1, saves=True)
        with self._saving():
            self._report(
                metrics, checkpoint, dir_name, mode, delete_local, upload_fn, validation, state, step
            )
        self._progress.reported()
        if stalled := self._times.take_stall():
            self._send(framing.frame(worker_messages.StallReported(self.index, stalled)))
        self._times.begin_step()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        with self._progress.during(Stage.CHECKPOINT), self._times.saving():
            yield

    def _report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None,
        dir_name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool | None,
        upload_fn: Callable[[Checkpoint, str], Checkpoint] | None,
        validation: bytes,
        state: Restorable | None,
        step: int | None,
    ) -> None:
        raw = self._encoded(metrics)
        if delete_local is None:
            delete_local = mode.default_delete_local_checkpoint_after_upload()
        self._uploads.raise_failed()
        uploads = mode is not CheckpointUploadMode.NO_UPLOAD and (upload_fn is None or delete_local)
        if checkpoint is not None and os.path.isdir(checkpoint.path):
            if uploads:
                check_source(Path(checkpoint.path), self._store, delete=delete_local)
            attempt = f"{self._spec.run_folder} {self._spec.epoch}"
            self._datasets().put_into(Path(checkpoint.path), attempt, self.index + 1)
        if state is not None:
            self._report_state(raw, state, step)
            return
        assert checkpoint is not None, "metrics alone are reported elsewhere"
        self.index += 1
        index = self.index
        with self._times.waiting(), self._progress.waiting(StackPlace.REPORT):
            self.uncommitted.wait_for_the_others(index)
        by_function = upload_fn is not None and mode is not CheckpointUploadMode.NO_UPLOAD
        if by_function:
            # Told before it is called: nobody else knows how long the function will take, or that it hangs.
            self._send_report(index, raw, owed=True, bound=True)
        try:
            share = self._uploads.share(self._uploads.folder(dir_name, index), index, raw, validation)
            part, upload, job = self._begin_upload(share, checkpoint, mode, delete_local, upload_fn)
        except Exception as error:  # whatever is raised: this rank's part will never come, and all must know
            if not by_function:
                self._send_report(index, raw, owed=True)
            self._uploads.failed(index, error)
            if not isinstance(error, StorageError):
                raise
            return  # the storage's failure is reported; training goes on
        # It may be the one at which the workers change over: then we wait for it, which the driver must know.
        held = bool(self._values.want_checkpoint.newest)
        if part is not None:
            part = msgspec.structs.replace(part, held=held)
        if not by_function:
            self._send_report(index, raw, part, owed=upload is not None)
        elif part is not None:
            self._send(framing.frame(worker_messages.PartDone(part)))
        if upload is not None:
            self._uploads.later(upload, index, held, job)
        if held:
            with self._progress.waiting(StackPlace.REPORT):
                self.uncommitted.hold(index)

    def _encoded(self, metrics: dict[str, Any]) -> msgspec.Raw:
        """As they are sent; nothing, where nobody looks at this rank's."""
        if not self._sends_metrics and isinstance(metrics, dict):
            return NO_METRICS
        encoded = encode_metrics(metrics)
        if len(encoded) > framing.MAX_PAYLOAD:
            raise too_large(metrics, len(encoded))
        return msgspec.Raw(encoded)

    def _begin_upload(
        self,
        share: checkpoints.Share,
        checkpoint: Checkpoint,
        mode: CheckpointUploadMode,
        delete_local: bool,
        upload_fn: Callable[[Checkpoint, str], Checkpoint] | None,
    ) -> tuple[Part | None, Callable[[], Part] | None, Path | None]:
        """The part, if it is in storage already; else what uploads it, and the job on disk that survives this
        process, if it has one.
        """
        if mode is CheckpointUploadMode.NO_UPLOAD:
            return self._uploads.note(share, checkpoint), None, None
        if upload_fn is not None:
            upload = partial(self._uploads.by_function, upload_fn, checkpoint, share, delete_local)
            return (upload(), None, None) if mode is CheckpointUploadMode.SYNC else (None, upload, None)
        if mode is CheckpointUploadMode.ASYNC:
            job = self._uploads.pin(share, checkpoint, keep=not delete_local)
            return None, partial(pending_uploads.finish, job, self._store), job
        part = checkpoints.upload_part(self._store, share, local_folder(checkpoint))
        if delete_local:
            shutil.rmtree(checkpoint.path, ignore_errors=True)
        return part, None, None

    def _word(
        self, index: int, raw: msgspec.Raw, part: Part | None = None, **more: Any
    ) -> worker_messages.Report:
        pace, self._pace = self._pace, None
        restore_s, at = self._restoring.take_seconds(), time.monotonic()
        return worker_messages.Report(index, raw, part, restore_s=restore_s, pace=pace, at=at, **more)

    def _send_report(self, index: int, raw: msgspec.Raw, part: Part | None = None, **more: Any) -> None:
        self._send(framing.frame(self._word(index, raw, part, **more)))

    def _report_state(self, raw: msgspec.Raw, state: Restorable, step: int | None) -> None:
        """Keep the state of this step, and write it to storage if that is due."""
        index = self.index + 1
        due = self._is_due()
        every = self._values.snapshot_every.ask()
        taken = self._state.report(state, index, step, every=every, due=due, limit_s=self._spec.report_wait_s)
        self.index, self._metrics = index, raw
        keeper, copy_s = self._state.keeper, self._state.copy_s
        remembered = taken is not None and taken.remembered
        taking = remembered and keeper.is_copying
        complete = remembered and not taking
        report = self._word(
            index, raw, owed=due, taken=complete, copy_s=copy_s if complete else 0.0, taking=taking
        )
        self._tell_refusal()
        if due and taken is not None:
            self._send_state(report, taken)
            return
        self._send(framing.frame(report))
        if due:
            self._uploads.failed(index, StorageError(f"no memory to write it from: {keeper.why_not}"))
        if taking:  # in this order: what is restored has been reported
            keeper.complete_later(lambda held_s, whole_s: self._tell_taken(index, copy_s + held_s, whole_s))

    def _tell_taken(self, index: int, copy_s: float, whole_s: float) -> None:
        self._send(framing.frame(worker_messages.SnapshotTaken(index, copy_s, whole_s)))

    def _tell_refusal(self) -> None:
        """That there is no memory for snapshots, once."""
        keeper = self._state.keeper
        if keeper.refused:
            self._send(framing.frame(worker_messages.NoMemory(keeper.refused)))
            keeper.refused = ""

    def _send_state(self, report: worker_messages.Report, taken: Taken) -> None:
        """Have a snapshot written to storage, and report it. In this order: what is reported is on its way,
        whatever becomes of this process.
        """
        index = report.index
        with self._times.waiting(), self._progress.waiting(StackPlace.REPORT):
            self.uncommitted.wait_for_the_others(index)
        share = self._uploads.share(self._uploads.folder(None, index), index, report.metrics)
        held = bool(self._values.want_checkpoint.newest)
        self._state.store(taken, share, held=held)
        self._send(framing.frame(report))
        if held:
            with self._progress.waiting(StackPlace.REPORT):
                self.uncommitted.hold(index)

    def _is_due(self) -> bool:
        """Whether the state is to be written to storage at this report; the same at all ranks."""
        wanted = bool(self._values.want_checkpoint.ask())
        return self._state.is_due(self._values.state_due.ask()) or wanted

    def finish(self) -> None:
        """Before the function's return counts: what is being uploaded must be there, and the last state."""
        with self._saving():
            self._save_last()
            self._state.keeper.complete()
            self._state.keeper.wait_for_storage()
            self._uploads.wait()
        if stalled := self._times.take_stall():
            self._send(framing.frame(worker_messages.StallReported(self.index + 1, stalled)))
        self._uploads.raise_failed()

    def _save_last(self) -> None:
        """What was reported last. If it can't be had any more, training is done all the same."""
        index = self.index + 1
        report = worker_messages.Report(index, self._metrics, owed=True, silent=True)
        try:
            taken = self._state.unsaved(index)
        except (ConfigError, StorageError) as error:
            self.index = index
            self._send(framing.frame(report))
            self._uploads.failed(index, error)
        else:
            if taken is not None:
                self.index = index
                self._send_state(report, taken)
