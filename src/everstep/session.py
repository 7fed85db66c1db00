"""What is behind the functions that a training function calls (``training``).

One session lives in each worker. It speaks to the driver through a ``Link``: messages up without waiting,
questions with an answer. Nothing here knows which engine or backend there is.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from everstep.agreed import AgreedValue
from everstep.checkpoint import (
    Checkpoint,
    CheckpointUploadMode,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
)
from everstep.context import TrainContext
from everstep.control.vitals import Stage
from everstep.datasets import NOWHERE, Datasets, agreed_places, is_place_file
from everstep.errors import StorageError
from everstep.metrics import NO_METRICS, encode_metrics, too_large
from everstep.protocol import framing, wire, words
from everstep.protocol.progress import Progress
from everstep.restored import RestoredCheckpoint
from everstep.snapshots.content import Folder, Restorable
from everstep.snapshots.keeper import HostMemory, Taken
from everstep.snapshots.layout import holds_state, places_in, rank_of_index
from everstep.snapshots.reported import ReportedState
from everstep.snapshots.writing import OwnMemory
from everstep.steptimes import StepTimes
from everstep.storage import checkpoints as store, restore, snapshots
from everstep.storage.sources import check_source
from everstep.storage.store import open_store
from everstep.uploading import EQUALLY_OFTEN, UncommittedReports, Uploads, local_folder

if TYPE_CHECKING:
    from everstep.control.reports import Part
    from everstep.control.snapshots import At
    from everstep.control.stragglers import Pace
    from everstep.preemption import PreemptionInfo


class Link(Protocol):
    """A worker's way to its driver."""

    def send(self, frame: bytes) -> None:
        """Hand a frame over. Returns once it can't be lost by this process's death."""
        ...

    def ask(self, what: str, body: bytes, timeout_s: float | None) -> bytes:
        """Ask the driver and wait for its answer."""
        ...


class Session:
    """The state behind the functions below."""

    def __init__(
        self,
        spec: wire.WorkerSpec,
        link: Link,
        memory: HostMemory | None = None,
        progress: Progress | None = None,
    ) -> None:
        """``memory``: of the host, for snapshots that outlive this process."""
        self.spec = spec
        self.progress = progress or Progress()
        self.times = StepTimes()
        self.context = TrainContext(spec)
        self.preemption: AgreedValue[PreemptionInfo | None] = AgreedValue(None)
        self.want_checkpoint = AgreedValue("")
        self.state_due = AgreedValue(0)
        self.snapshot_every = AgreedValue(spec.snapshot_every)
        self._link = link
        self._run = open_store(spec.run_folder, spec.storage_options, spec.storage_limits)
        self._spool = Path(spec.spool) if spec.spool else snapshots.default_spool()
        self._rank = spec.member.rank
        self._index = 0
        self._began = time.monotonic()
        self._restored = 0.0
        self._uploads = Uploads(spec, self._run, link.send)
        self._uncommitted = UncommittedReports(spec)
        self.datasets = Datasets(self._rank, {}, lambda: NOWHERE)
        self._state = ReportedState(
            spec.epoch,
            self._rank,
            spec.member.world_size,
            memory or OwnMemory(self._uploads.store_here),
            spec.snapshot,
            lambda: self.datasets.places(),
            lambda mine: self._link.ask("broadcast", mine, spec.report_wait_s),
        )
        self._metrics = NO_METRICS
        """Of the newest report."""
        self._restored_from: Checkpoint | None = None
        self._pace: Pace | None = None
        """Of the step that the report at hand ends."""
        self._sends_metrics = spec.member.group_rank == 0 or spec.all_metrics

    # ------------------------------------------------------------------ reporting

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
        saves = checkpoint is not None or state is not None
        self._pace = self.times.end_step(self._index + 1, saves=saves)
        with self._saving() if saves else nullcontext():
            self._report(
                metrics, checkpoint, dir_name, mode, delete_local, upload_fn, validation, state, step
            )
        self.progress.reported()
        if saves and (stalled := self.times.take_stall()):
            self._link.send(framing.frame(words.StallTold(self._index, stalled)))
        self.times.begin_step()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        with self.progress.during(Stage.CHECKPOINT), self.times.saving():
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
        raw = NO_METRICS
        if self._sends_metrics or not isinstance(metrics, dict):
            raw = encode_metrics(metrics)
            if len(bytes(raw)) > framing.MAX_PAYLOAD:
                raise too_large(metrics, len(bytes(raw)))
        if delete_local is None:
            delete_local = mode.default_delete_local_checkpoint_after_upload()
        self._uploads.raise_failed()
        uploads = mode is not CheckpointUploadMode.NO_UPLOAD and (upload_fn is None or delete_local)
        if checkpoint is not None and os.path.isdir(checkpoint.path):
            if uploads:
                check_source(Path(checkpoint.path), self._run, delete=delete_local)
            attempt = f"{self.spec.run_folder} {self.spec.epoch}"
            self.datasets.put_into(Path(checkpoint.path), attempt, self._index + 1)
        if state is not None:
            self._report_state(raw, state, step)
            return
        self._index += 1
        index = self._index
        if checkpoint is None:
            self._send_report(index, raw)
            return
        with self.times.waiting():
            self._uncommitted.wait_for_the_others(index)
        job: Path | None = None
        part: Part | None = None
        upload: Callable[[], Part] | None = None
        by_function = upload_fn is not None and mode is not CheckpointUploadMode.NO_UPLOAD
        if by_function:
            # Told before it is called: nobody else knows how long the function will take, or that it hangs.
            self._send_report(index, raw, owed=True, bound=True)
        try:
            share = self._uploads.share(self._uploads.folder(dir_name, index), index, raw, validation)
            if mode is CheckpointUploadMode.NO_UPLOAD:
                part = self._uploads.note(share, checkpoint)
            elif upload_fn is not None:
                upload = partial(self._uploads.by_function, upload_fn, checkpoint, share, delete_local)
                if mode is CheckpointUploadMode.SYNC:
                    part, upload = upload(), None
            elif mode is CheckpointUploadMode.ASYNC:
                source = local_folder(checkpoint)
                job = snapshots.take(self._spool, self._run.address(), share, source, keep=not delete_local)
                upload = partial(snapshots.finish, job, self._run)
            else:
                part = store.upload_part(self._run, share, local_folder(checkpoint))
                if delete_local:
                    shutil.rmtree(checkpoint.path, ignore_errors=True)
        except Exception as error:  # whatever is raised: this rank's part will never come, and all must know
            if not by_function:
                self._send_report(index, raw, owed=True)
            self._uploads.failed(index, error)
            if not isinstance(error, StorageError):
                raise
            return  # the storage's failure is told; training goes on
        # It may be the one at which the workers change over: then we wait for it, and the driver is told so.
        held = bool(self.want_checkpoint.newest)
        if part is not None:
            part = msgspec.structs.replace(part, held=held)
        if not by_function:
            self._send_report(index, raw, part, owed=upload is not None)
        elif part is not None:
            self._link.send(framing.frame(words.PartDone(part)))
        if upload is not None:
            self._uploads.later(upload, index, held, job)
        if held:
            self._uncommitted.hold(index)

    def _word(self, index: int, raw: msgspec.Raw, part: Part | None = None, **more: Any) -> words.Report:
        restored, self._restored = self._restored, 0.0
        pace, self._pace = self._pace, None
        return words.Report(index, raw, part, restore_s=restored, pace=pace, **more)

    def _send_report(self, index: int, raw: msgspec.Raw, part: Part | None = None, **more: Any) -> None:
        self._link.send(framing.frame(self._word(index, raw, part, **more)))

    def _report_state(self, raw: msgspec.Raw, state: Restorable, step: int | None) -> None:
        """Keep the state of this step, and write it to storage if that is due."""
        index = self._index + 1
        due = self._is_due()
        every = self.snapshot_every.ask()
        taken = self._state.report(state, index, step, every=every, due=due, limit_s=self.spec.report_wait_s)
        self._index, self._metrics = index, raw
        keeper, copy_s = self._state.keeper, self._state.copy_s
        remembered = taken is not None and taken.remembered
        copying = remembered and keeper.is_copying
        copied = remembered and not copying
        report = self._word(
            index, raw, owed=due, copied=copied, copy_s=copy_s if copied else 0.0, copying=copying
        )
        self._tell_refusal()
        if due and taken is not None:
            self._send_state(report, taken)
            return
        self._link.send(framing.frame(report))
        if copying:  # in this order: what is restored has been reported
            keeper.complete_later(lambda held_s, whole_s: self._tell_copied(index, copy_s + held_s, whole_s))

    def _tell_copied(self, index: int, copy_s: float, whole_s: float) -> None:
        self._link.send(framing.frame(words.Copied(index, copy_s, whole_s)))

    def _tell_refusal(self) -> None:
        """That there is no memory for snapshots, once."""
        keeper = self._state.keeper
        if keeper.refused:
            self._link.send(framing.frame(words.NoMemory(keeper.refused)))
            keeper.refused = ""

    def _send_state(self, report: words.Report, taken: Taken) -> None:
        """Have a snapshot written to storage, and report it. In this order: what is reported is on its way,
        whatever becomes of this process.
        """
        index = report.index
        with self.times.waiting():
            self._uncommitted.wait_for_the_others(index)
        share = self._uploads.share(self._uploads.folder(None, index), index, report.metrics)
        held = bool(self.want_checkpoint.newest)
        self._state.store(taken, share, held=held)
        self._link.send(framing.frame(report))
        if held:
            self._uncommitted.hold(index)

    def _is_due(self) -> bool:
        """Whether the state is to be written to storage at this report; the same at all ranks."""
        wanted = bool(self.want_checkpoint.ask())
        return self._state.is_due(self.state_due.ask()) or wanted

    def undriven(self, now: bool) -> None:
        self._uncommitted.undriven(now)
        self._state.keeper.undriven(now)
        if now:
            self.want_checkpoint.abandon()
            self.state_due.abandon()
            self.snapshot_every.abandon()
            self.preemption.abandon()

    def proposed(self, number: int, value: words.AnyValue) -> int:
        """The driver wants all ranks to see this from the same call on. How many calls there were here."""
        match value:
            case words.WantCheckpoint():
                return self.want_checkpoint.propose(number, value.reason)
            case words.StateDue():
                return self.state_due.propose(number, value.turn)
            case words.SnapshotEvery():
                return self.snapshot_every.propose(number, value.reports)
            case words.PreemptionTold():
                from everstep.preemption import PreemptionInfo

                ranks = value.node_to_ranks
                return self.preemption.propose(
                    number, PreemptionInfo(value.deadline_ms, ranks) if ranks else None
                )

    def agreed(self, number: int, start: int) -> None:
        self.want_checkpoint.agree(number, start)
        self.state_due.agree(number, start)
        self.snapshot_every.agree(number, start)
        self.preemption.agree(number, start)

    def kept(self, at: At | None, upto: At) -> None:
        """Every rank has the snapshot ``at``; of those up to ``upto``, nothing else is needed."""
        self._state.keeper.settled(at, upto)

    def committed(self, index: int) -> None:
        """The driver has committed the checkpoint of this report, or given it up."""
        self._uncommitted.committed(index)

    def finish(self) -> None:
        """Before the function's return counts: what is being uploaded must be there, and the last state."""
        with self._saving():
            taken = self._state.unsaved(self._index + 1)
            if taken is not None:
                self._index += 1
                self._send_state(words.Report(self._index, self._metrics, owed=True, silent=True), taken)
            self._state.keeper.complete()
            self._state.keeper.wait_for_storage()
            self._uploads.wait()
        if stalled := self.times.take_stall():
            self._link.send(framing.frame(words.StallTold(self._index + 1, stalled)))
        self._uploads.raise_failed()

    # ------------------------------------------------------------------ restoring

    def hand_over(self, datasets: Mapping[str, Any]) -> None:
        """The data sets that the training function can ask for."""
        self.datasets = Datasets(self._rank, datasets, self._places)

    def _places(self) -> Mapping[str, Any]:
        """Of data sets, in the checkpoint that this worker starts from."""
        remembered = self._state.restored_places()
        if remembered is not None:
            return remembered
        if self._restored_from is not None:
            checkpoint = self._restored_from._store()
        elif self.spec.checkpoint is not None:
            checkpoint = self._run.child(self.spec.checkpoint)
        else:
            return NOWHERE
        found = restore.read(
            checkpoint,
            lambda path: is_place_file(path) or rank_of_index(path) is not None,
            self.spec.storage_options,
        )
        return agreed_places(
            {path: data if is_place_file(path) else places_in(data) for path, data in found.items()}
        )

    def checkpoint(self) -> Checkpoint | None:
        """What this worker was given to start from, until it has reported something itself."""
        if self._index:
            return self._newest()
        if self.spec.checkpoint is None:
            return None
        options = self.spec.storage_options
        manifest = store.manifest_of(self._run.child(self.spec.checkpoint))
        if manifest is not None and manifest.external:
            return Checkpoint(manifest.external, storage_options=options)
        return RestoredCheckpoint(self._run.address(self.spec.checkpoint), storage_options=options)

    def _newest(self) -> Checkpoint | None:
        limit_s = self.spec.report_wait_s
        try:
            found = self._list("newest", self._index, limit_s)
        except TimeoutError:
            raise RuntimeError(
                f"get_checkpoint() at rank {self._rank} waits for report {self._index} of other ranks since "
                f"{limit_s:g} s (Deadlines.report_wait_s): {EQUALLY_OFTEN}"
            ) from None
        options = self.spec.storage_options
        for one in found:
            kind = Checkpoint if one.external else RestoredCheckpoint
            return kind(one.address, storage_options=options)
        return None

    def restore(self, state: Restorable) -> int:
        """Load the newest state that there is. Returns its step."""
        if self._index:
            raise RuntimeError(
                "State.restore() after report(): call it once, before the first step, so that nothing that "
                "was trained is written over"
            )
        try:
            step = self._state.restore(state)
            if step is not None:
                return step
            for checkpoint in self._with_state():
                with checkpoint.as_directory() as folder:
                    saved = Folder(Path(folder))
                    state.load(saved, self._rank)
                    self._restored_from = checkpoint
                    return saved.index(saved.ranks[0]).step
            return 0
        finally:
            self.restored()

    def _with_state(self) -> Iterator[Checkpoint]:
        """Checkpoints that hold a state, from the newest down. The newest may be one that the training
        function has made itself.
        """
        newest = self.checkpoint()
        if newest is None:
            return
        if _has_state(newest):
            yield newest
        else:
            for one in reversed(self._list("checkpoints", 0, None)):
                checkpoint = RestoredCheckpoint(one.address, storage_options=self.spec.storage_options)
                if not one.external and _has_state(checkpoint):
                    yield checkpoint

    def reported(self, validated: bool, timeout_s: float | None) -> list[ReportedCheckpoint]:
        """``validated``: once no validation is to come either."""
        try:
            limit_s = None if timeout_s is None else max(0.0, timeout_s)
            if validated and self.spec.validates:
                with self.times.waiting(), self.progress.during(Stage.PAUSE, "validation"):
                    found = self._answers("validated", self._index, limit_s)
            else:
                found = self._list("checkpoints", self._index, limit_s)
        except TimeoutError:
            found = self._list("checkpoints", 0, None)  # as it is now
        options = self.spec.storage_options
        return [
            ReportedCheckpoint(
                Checkpoint(one.address, storage_options=options),
                one.metrics,
                ReportedCheckpointStatus(one.status),
            )
            for one in found
        ]

    def _list(self, what: str, upto: int, timeout_s: float | None) -> list[words.Listed]:
        with self.times.waiting(), self.progress.during(Stage.CHECKPOINT):  # the driver may be committing it
            return self._answers(what, upto, timeout_s)

    def _answers(self, what: str, upto: int, timeout_s: float | None) -> list[words.Listed]:
        return words.listing.decode(self._link.ask(what, msgspec.msgpack.encode(upto), timeout_s))

    def restored(self) -> None:
        if not self._index:
            self._restored = time.monotonic() - self._began

    def begin(self) -> None:
        """The training function starts now."""
        self._began = time.monotonic()
        self.progress.enter(Stage.FIRST_STEP)

    # ------------------------------------------------------------------ asking

    def ask(self, what: str, body: bytes = b"") -> bytes:
        with self.times.waiting():
            return self._link.ask(what, body, None)


def _has_state(checkpoint: Checkpoint) -> bool:
    manifest = store.manifest_of(checkpoint._store())
    return manifest is not None and holds_state(file.path for file in manifest.files)
