"""What a training function calls.

One session lives in each worker. It speaks to the driver through a ``Link``: messages up without waiting,
questions with an answer. Nothing here knows which engine or backend there is.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from everstep.agent import wire
from everstep.agent.progress import Progress
from everstep.agreed import AgreedValue
from everstep.checkpoint import (
    Checkpoint,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
)
from everstep.control.vitals import Stage
from everstep.datasets import NOWHERE, Datasets, agreed_places, is_place_file
from everstep.errors import ConfigError, RefusedError, StorageError, TooLargeError
from everstep.refusals import TuneContext
from everstep.snapshots.content import Folder, Restorable
from everstep.snapshots.keeper import HostMemory, Taken
from everstep.snapshots.layout import Index, holds_state, rank_of_index
from everstep.snapshots.reported import ReportedState
from everstep.snapshots.segments import Slot
from everstep.snapshots.writing import OwnMemory, write
from everstep.storage import checkpoints as store, restore, snapshots
from everstep.storage.background import BackgroundUploads
from everstep.storage.sources import check_source, overlap
from everstep.storage.store import open_store

if TYPE_CHECKING:
    from everstep.control.reports import Part
    from everstep.control.snapshots import At
    from everstep.preemption import PreemptionInfo

MAX_UNCOMMITTED = 16
"""Checkpoints of one rank that may wait for other ranks, before ``report`` waits."""

_EQUALLY_OFTEN = (
    "every rank must call report() equally often, with checkpoint=None where it has nothing to save"
)


class Link(Protocol):
    """A worker's way to its driver."""

    def send(self, frame: bytes) -> None:
        """Hand a frame over. Returns once it can't be lost by this process's death."""
        ...

    def ask(self, what: str, body: bytes, timeout_s: float | None) -> bytes:
        """Ask the driver and wait for its answer."""
        ...


class StorageContext:
    """Where the run lives: what ``get_context().get_storage()`` gives."""

    def __init__(self, run_folder: str, name: str) -> None:
        self.experiment_fs_path = run_folder
        self.storage_fs_path = run_folder.rpartition("/")[0]
        self.experiment_dir_name = name

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Where a checkpoint of this name lies: for a ``checkpoint_upload_fn``."""
        return f"{self.experiment_fs_path}/{checkpoint_name}"


class TrainContext(TuneContext):
    """A worker's place in the run."""

    def __init__(self, spec: wire.WorkerSpec) -> None:
        self._spec = spec

    def get_experiment_name(self) -> str:
        """The run's name."""
        return self._spec.run_name

    def get_world_size(self) -> int:
        """The number of workers of this attempt."""
        return self._spec.member.world_size

    def get_world_rank(self) -> int:
        """This worker's rank among all, from 0."""
        return self._spec.member.rank

    def get_local_rank(self) -> int:
        """Its rank among the workers of its host, from 0."""
        return self._spec.member.local_rank

    def get_local_world_size(self) -> int:
        """The number of workers on its host."""
        return self._spec.member.local_world_size

    def get_node_rank(self) -> int:
        """The number of its host among the run's hosts, from 0."""
        return self._spec.member.node_rank

    def get_storage(self) -> StorageContext:
        """Where the run's folder is."""
        return StorageContext(self._spec.run_folder, self._spec.run_name)

    # Ours, beyond Ray Train's.

    def get_epoch(self) -> int:
        """The number of this attempt, from 1."""
        return self._spec.epoch

    def get_restart_reason(self) -> str:
        """Why the workers were started this time."""
        return self._spec.reason

    def get_slice_id(self) -> int:
        """The number of its slice, from 0."""
        return self._spec.member.slice_id

    def get_num_slices(self) -> int:
        """The number of slices of this attempt."""
        return self._spec.member.num_slices

    def get_replica_group_id(self) -> int:
        """The number of its replica group, from 0."""
        return self._spec.member.group_id

    def get_num_replica_groups(self) -> int:
        """The number of replica groups; 1 where there are none."""
        return self._spec.member.num_groups

    def get_replica_group_rank(self) -> int:
        """Its rank in its replica group, from 0."""
        return self._spec.member.group_rank


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
        self._uploads = BackgroundUploads()
        self._uncommitted: list[int] = []
        self._committed = threading.Condition()
        self._undriven = False
        self.datasets = Datasets(self._rank, {}, lambda: NOWHERE)
        self._state = ReportedState(
            spec.epoch,
            self._rank,
            spec.member.world_size,
            memory or OwnMemory(self._store_here),
            spec.snapshot,
            lambda: self.datasets.places(),
            lambda mine: self._link.ask("broadcast", mine, spec.report_wait_s),
        )
        self._metrics = _EMPTY
        """Of the newest report."""
        self._restored_from: Checkpoint | None = None
        self._failed_upload: BaseException | None = None
        self._sends_metrics = spec.member.group_rank == 0 or spec.all_metrics
        self._group = spec.member.group_id if spec.member.group_size != spec.member.world_size else None

    # ------------------------------------------------------------------ reporting

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None,
        dir_name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool | None,
        upload_fn: Callable[[Checkpoint, str], Checkpoint] | None,
        state: Restorable | None = None,
        step: int | None = None,
    ) -> None:
        saves = checkpoint is not None or state is not None
        with self.progress.during(Stage.CHECKPOINT) if saves else nullcontext():
            self._report(metrics, checkpoint, dir_name, mode, delete_local, upload_fn, state, step)
        self.progress.reported()

    def _report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None,
        dir_name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool | None,
        upload_fn: Callable[[Checkpoint, str], Checkpoint] | None,
        state: Restorable | None,
        step: int | None,
    ) -> None:
        raw = _EMPTY
        if self._sends_metrics or not isinstance(metrics, dict):
            raw = _encode_metrics(metrics)
            if len(bytes(raw)) > wire.MAX_PAYLOAD:
                raise _too_large(metrics, len(bytes(raw)))
        if delete_local is None:
            delete_local = mode.default_delete_local_checkpoint_after_upload()
        self._raise_failed_upload()
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
        restored, self._restored = self._restored, 0.0
        if checkpoint is None:
            self._link.send(wire.frame(wire.Report(index, raw, None, False, restored)))
            return
        self._wait_for_the_others(index)
        job: Path | None = None
        part: Part | None = None
        upload: Callable[[], Part] | None = None
        by_function = upload_fn is not None and mode is not CheckpointUploadMode.NO_UPLOAD
        if by_function:
            # Told before it is called: nobody else knows how long the function will take, or that it hangs.
            self._link.send(wire.frame(wire.Report(index, raw, None, True, restored, True)))
        try:
            share = self._share(self._folder(dir_name, index), index, raw)
            if mode is CheckpointUploadMode.NO_UPLOAD:
                part = self._note(share, checkpoint)
            elif upload_fn is not None:
                upload = partial(self._upload_by, upload_fn, checkpoint, share, delete_local)
                if mode is CheckpointUploadMode.SYNC:
                    part, upload = upload(), None
            elif mode is CheckpointUploadMode.ASYNC:
                source = Path(_local(checkpoint))
                job = snapshots.take(self._spool, self._run.address(), share, source, keep=not delete_local)
                upload = partial(snapshots.finish, job, self._run)
            else:
                part = store.upload_part(self._run, share, Path(_local(checkpoint)))
                if delete_local:
                    shutil.rmtree(checkpoint.path, ignore_errors=True)
        except Exception as error:  # whatever is raised: this rank's part will never come, and all must know
            if not by_function:
                self._link.send(wire.frame(wire.Report(index, raw, None, True, restored)))
            self._part_failed(index, error)
            if not isinstance(error, StorageError):
                raise
            return  # the storage's failure is told; training goes on
        # It may be the one at which the workers change over: then we wait for it, and the driver is told so.
        held = bool(self.want_checkpoint.newest)
        if part is not None:
            part = msgspec.structs.replace(part, held=held)
        if not by_function:
            self._link.send(wire.frame(wire.Report(index, raw, part, upload is not None, restored)))
        elif part is not None:
            self._link.send(wire.frame(wire.PartDone(part)))
        if upload is not None:
            self._uploads.submit(partial(self._upload_later, upload, index, held, job))
        if held:
            self._hold(index)

    def _report_state(self, raw: msgspec.Raw, state: Restorable, step: int | None) -> None:
        """Keep the state of this step, and write it to storage if that is due."""
        index = self._index + 1
        due = self._is_due()
        every = self.snapshot_every.ask()
        taken = self._state.report(state, index, step, every=every, due=due, limit_s=self.spec.report_wait_s)
        self._index, self._metrics = index, raw
        restored, self._restored = self._restored, 0.0
        keeper, copy_s = self._state.keeper, self._state.copy_s
        remembered = taken is not None and taken.remembered
        copying = remembered and keeper.is_copying
        copied = remembered and not copying
        report = wire.Report(
            index, raw, None, due, restored, copied=copied, copy_s=copy_s if copied else 0.0, copying=copying
        )
        self._tell_refusal()
        if due and taken is not None:
            self._send_state(report, taken)
            return
        self._link.send(wire.frame(report))
        if copying:  # in this order: what is restored has been reported
            keeper.complete_later(lambda held_s, whole_s: self._tell_copied(index, copy_s + held_s, whole_s))

    def _tell_copied(self, index: int, copy_s: float, whole_s: float) -> None:
        self._link.send(wire.frame(wire.Copied(index, copy_s, whole_s)))

    def _tell_refusal(self) -> None:
        """That there is no memory for snapshots, once."""
        keeper = self._state.keeper
        if keeper.refused:
            self._link.send(wire.frame(wire.NoMemory(keeper.refused)))
            keeper.refused = ""

    def _send_state(self, report: wire.Report, taken: Taken) -> None:
        """Have a snapshot written to storage, and report it. In this order: what is reported is on its way,
        whatever becomes of this process.
        """
        index = report.index
        self._wait_for_the_others(index)
        share = self._share(self._folder(None, index), index, report.metrics)
        held = bool(self.want_checkpoint.newest)
        self._state.store(taken, share, held=held)
        self._link.send(wire.frame(report))
        if held:
            self._hold(index)

    def _store_here(self, slot: Slot, share: store.Share, held: bool, done: Callable[[], None]) -> None:
        """Write a snapshot to storage from this process, where there is no agent that does."""

        def upload() -> Part:
            try:
                return write(self._run, share, slot, with_shared=self.spec.member.group_rank == 0)
            finally:
                done()

        self._uploads.submit(partial(self._upload_later, upload, share.index, held, None))

    def _is_due(self) -> bool:
        """Whether the state is to be written to storage at this report; the same at all ranks."""
        wanted = bool(self.want_checkpoint.ask())
        return self._state.is_due(self.state_due.ask()) or wanted

    def _hold(self, index: int) -> None:
        """If the workers change over, they are ended in here, so that no step is made in vain; else training
        goes on once the checkpoint is committed.
        """
        with self._committed:
            self._committed.wait_for(
                lambda: index not in self._uncommitted or self._undriven, self.spec.hold_s
            )

    def _share(self, folder: str, index: int, metrics: msgspec.Raw) -> store.Share:
        spec = self.spec
        return store.Share(
            folder,
            self._rank,
            spec.epoch,
            index,
            spec.member.group_id,
            spec.generation,
            spec.member.group_size,
            bytes(metrics) if spec.member.group_rank == 0 else b"",
        )

    def _note(self, share: store.Share, checkpoint: Checkpoint) -> Part:
        return store.note_external(self._run, share, checkpoint.path, self.spec.storage_options)

    def _upload_by(
        self,
        upload_fn: Callable[[Checkpoint, str], Checkpoint],
        checkpoint: Checkpoint,
        share: store.Share,
        delete_local: bool,
    ) -> Part:
        """Let the user's function upload it, and note where it says that it has."""
        done = upload_fn(checkpoint, share.folder)
        if not isinstance(done, Checkpoint):
            raise ConfigError(
                f"checkpoint_upload_fn returned a {_kind_of(done)}, expected an everstep.Checkpoint",
                "return everstep.Checkpoint(path) with the place that it has uploaded to",
            )
        part = self._note(share, done)
        is_elsewhere = "://" in done.path or not overlap(Path(done.path), Path(checkpoint.path))
        if delete_local and is_elsewhere:
            shutil.rmtree(checkpoint.path, ignore_errors=True)
        return part

    def _upload_later(self, upload: Callable[[], Part], index: int, held: bool, job: Path | None) -> None:
        try:
            part = upload()
        except BaseException as error:  # also sys.exit(): it must reach the driver, not end with this thread
            self._part_failed(index, error)
            if job is None:  # the user's own function: as if it had been called in report()
                self._failed_upload = error
        else:
            self._link.send(wire.frame(wire.PartDone(msgspec.structs.replace(part, held=held))))
        finally:
            if job is not None:
                snapshots.forget(job)

    def _raise_failed_upload(self) -> None:
        """What a function of the user's raised in the background is raised in the foreground."""
        error, self._failed_upload = self._failed_upload, None
        if error is not None and not isinstance(error, StorageError):
            raise error

    def _part_failed(self, index: int, error: BaseException) -> None:
        self._link.send(wire.frame(wire.PartFailed(index, wire.described(error))))

    def _folder(self, name: str | None, index: int) -> str:
        spec = self.spec
        if name is None:
            return store.folder_name(spec.epoch, index, self._group, spec.generation)
        incarnation = (
            f"e{spec.epoch}" if self._group is None else f"e{spec.epoch}g{self._group}.{spec.generation}"
        )
        return store.claim_name(self._run, name, incarnation, index, self._rank)

    def _wait_for_the_others(self, index: int) -> None:
        """A rank may be some checkpoints ahead of the others, not any number."""
        deadline = time.monotonic() + self.spec.report_wait_s
        with self._committed:
            # Without a driver nothing is committed: then the agent's buffers are what bounds it.
            while len(self._uncommitted) >= MAX_UNCOMMITTED and not self._undriven:
                left = deadline - time.monotonic()
                if left <= 0 or not self._committed.wait(left):
                    raise RuntimeError(
                        f"rank {self._rank} has {MAX_UNCOMMITTED} checkpoints that other ranks have not "
                        f"reported after {self.spec.report_wait_s:g} s (Deadlines.report_wait_s): "
                        f"{_EQUALLY_OFTEN}"
                    )
            self._uncommitted.append(index)

    def undriven(self, now: bool) -> None:
        with self._committed:
            self._undriven = now
            self._committed.notify_all()
        self._state.keeper.undriven(now)
        if now:
            self.want_checkpoint.abandon()
            self.state_due.abandon()
            self.snapshot_every.abandon()
            self.preemption.abandon()

    def proposed(self, number: int, value: wire.AnyValue) -> int:
        """The driver wants all ranks to see this from the same call on. How many calls there were here."""
        match value:
            case wire.WantCheckpoint():
                return self.want_checkpoint.propose(number, value.reason)
            case wire.StateDue():
                return self.state_due.propose(number, value.turn)
            case wire.SnapshotEvery():
                return self.snapshot_every.propose(number, value.reports)
            case wire.PreemptionTold():
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
        with self._committed:
            self._uncommitted = [k for k in self._uncommitted if k > index]
            self._committed.notify_all()

    def finish(self) -> None:
        """Before the function's return counts: what is being uploaded must be there, and the last state."""
        with self.progress.during(Stage.CHECKPOINT):
            taken = self._state.unsaved(self._index + 1)
            if taken is not None:
                self._index += 1
                self._send_state(wire.Report(self._index, self._metrics, owed=True, silent=True), taken)
            self._state.keeper.complete()
            self._state.keeper.wait_for_storage()
            self._uploads.wait()
        self._raise_failed_upload()

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
            {path: data if is_place_file(path) else _places_in(data) for path, data in found.items()}
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
                f"{limit_s:g} s (Deadlines.report_wait_s): {_EQUALLY_OFTEN}"
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

    def reported(self, timeout_s: float | None) -> list[ReportedCheckpoint]:
        try:
            limit_s = None if timeout_s is None else max(0.0, timeout_s)
            found = self._list("checkpoints", self._index, limit_s)
        except TimeoutError:
            found = self._list("checkpoints", 0, None)  # as it is now
        options = self.spec.storage_options
        return [
            ReportedCheckpoint(Checkpoint(one.address, storage_options=options), one.metrics) for one in found
        ]

    def _list(self, what: str, upto: int, timeout_s: float | None) -> list[wire.Listed]:
        with self.progress.during(Stage.CHECKPOINT):  # the driver may be committing it
            return wire.listing.decode(self._link.ask(what, msgspec.msgpack.encode(upto), timeout_s))

    def restored(self) -> None:
        if not self._index:
            self._restored = time.monotonic() - self._began

    def begin(self) -> None:
        """The training function starts now."""
        self._began = time.monotonic()
        self.progress.enter(Stage.FIRST_STEP)

    # ------------------------------------------------------------------ asking

    def ask(self, what: str, body: bytes = b"") -> bytes:
        return self._link.ask(what, body, None)


def _places_in(index: bytes) -> bytes:
    return json.dumps({"places": Index.decoded(index).places}).encode()


def _has_state(checkpoint: Checkpoint) -> bool:
    manifest = store.manifest_of(checkpoint._store())
    return manifest is not None and holds_state(file.path for file in manifest.files)


class RestoredCheckpoint(Checkpoint):
    """The checkpoint that a worker was given: it also notes when it has been read, for the recovery's
    account.
    """

    _is_committed = True

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        with _restoring():
            return super().to_directory(path)

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        with _restoring(), restore.borrow(self._store(), restore.default_cache()) as folder:
            yield str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_plain_checkpoint, (self.path, self._options))


def _plain_checkpoint(path: str, options: dict[str, str]) -> Checkpoint:
    return Checkpoint(path, storage_options=options)


def _local(checkpoint: Checkpoint) -> str:
    """The folder of a checkpoint that is to be uploaded."""
    if "://" in checkpoint.path:
        raise ConfigError(
            f"report(checkpoint={checkpoint!r}) is in remote storage already",
            "report it with checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD",
        )
    if not os.path.isdir(checkpoint.path):
        raise ConfigError(
            f"report(checkpoint={checkpoint!r}): there is no such folder on this host",
            "report a checkpoint before its temporary folder is removed",
        )
    return checkpoint.path


_EMPTY = msgspec.Raw(msgspec.msgpack.encode({}))
_encoder = msgspec.msgpack.Encoder(enc_hook=wire.encode_odd)


def _encode_metrics(metrics: dict[str, Any]) -> msgspec.Raw:
    if not isinstance(metrics, dict):
        raise ConfigError(f"report(metrics) got {type(metrics).__name__}", "give it a dict", field="metrics")
    try:
        return msgspec.Raw(_encoder.encode(metrics))
    except (TypeError, ValueError, OverflowError) as error:
        for key, value in metrics.items():
            try:
                _encoder.encode({key: value})
            except (TypeError, ValueError, OverflowError) as reason:
                raise ConfigError(
                    f"report(metrics): {key!r} can't be reported: {reason}",
                    "report numbers, strings, lists and dicts of them; a tensor with .item() or .tolist()",
                    field="metrics",
                ) from error
        raise


def _too_large(metrics: dict[str, Any], size: int) -> TooLargeError:
    sizes = {key: len(_encoder.encode(value)) for key, value in metrics.items()}
    largest = max(sizes, key=lambda key: sizes[key])
    return TooLargeError(
        f"report(metrics) of {wire.as_size(size)}, of which {largest!r} has {wire.as_size(sizes[largest])}: "
        f"at most {wire.as_size(wire.MAX_PAYLOAD)} can be reported at once",
        "save large values as files of a checkpoint, and report numbers about them",
    )


# ---------------------------------------------------------------------- the current session

_session: Session | None = None
_pid = 0


def enter(session: Session | None) -> None:
    """Make this the process's session."""
    global _session, _pid
    _session, _pid = session, os.getpid()


@contextmanager
def _restoring() -> Iterator[None]:
    if _session is None:
        yield
        return
    try:
        with _session.progress.during(Stage.RESTORE):
            yield
    finally:
        _session.restored()


def current(what: str) -> Session:
    """This process's session, or an error that says where ``what`` may be called."""
    if _session is None or _pid != os.getpid():
        raise RuntimeError(
            f"{what}() works inside a training function only: call it in what you give to a Trainer"
            + (", not in a process that it forked (a data loader's worker)" if _session is not None else "")
        )
    return _session


# ---------------------------------------------------------------------- the public functions


def report(
    metrics: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    validation: bool = False,
    *,
    state: Restorable | None = None,
    step: int | None = None,
) -> None:
    """Report metrics, and optionally this rank's part of a checkpoint, or the training state.

    The k-th report of every rank forms one. It isn't a barrier: a rank waits for its own upload at most. Rank
    0's metrics are the run's.

    With ``checkpoint_upload_mode=ASYNC`` the upload goes on behind training's back, also that of a
    ``checkpoint_upload_fn``. What such a function raises there is raised by the next ``report``, or when the
    training function returns; what it has not uploaded yet is lost with its process.

    With ``state`` (an ``everstep.torch.State`` or ``everstep.jax.State``) and ``step``, the number of the
    step that is done, Everstep decides when the state is written to storage. Every rank gives it.
    """
    if validation:
        raise RefusedError(
            "report(validation=…) is refused.", "Evaluate in the training function, or in a run of its own."
        )
    session = current("report")
    if checkpoint is not None:
        _check_kind("checkpoint", checkpoint, Checkpoint)
    _check_kind("checkpoint_upload_mode", checkpoint_upload_mode, CheckpointUploadMode)
    if checkpoint_upload_fn is not None and not callable(checkpoint_upload_fn):
        raise _other_kind("checkpoint_upload_fn", checkpoint_upload_fn, "a function")
    session.report(
        metrics,
        checkpoint,
        checkpoint_dir_name,
        checkpoint_upload_mode,
        delete_local_checkpoint_after_upload,
        checkpoint_upload_fn,
        state,
        step,
    )


def heartbeat() -> None:
    """Say that training gets on, between reports that are far apart. It costs less than a microsecond.

    A worker that neither reports nor calls this for longer than usual, and does nothing else either, counts
    as hung: ``FailureConfig(on_hang=…)``.
    """
    current("heartbeat").progress.beat()


@contextmanager
def pause(what: str, timeout_s: float | None = None) -> Iterator[None]:
    """``with train.pause("eval"):`` something in which this rank makes no progress, as far as others can
    see. It counts as hung only after ``timeout_s``, or ``Deadlines.hang_pause_s``.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(
            f"pause(timeout_s={timeout_s!r})",
            "give a number of seconds above 0, or leave it out",
            "timeout_s",
        )
    with current("pause").progress.during(Stage.PAUSE, what, timeout_s or 0.0):
        yield


def _check_kind(argument: str, given: object, kind: type) -> None:
    """A script that was moved over in part may give Ray Train's, which looks the same and isn't."""
    if not isinstance(given, kind):
        raise _other_kind(argument, given, f"an everstep.{kind.__name__}")


def _other_kind(argument: str, given: object, expected: str) -> ConfigError:
    return ConfigError(
        f"report({argument}=…) is a {_kind_of(given)}, expected {expected}",
        f"give {expected}",
        f"report.{argument}",
    )


def _kind_of(given: object) -> str:
    kind = type(given)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def get_checkpoint() -> Checkpoint | None:
    """The newest committed checkpoint of the run, or None if there is none yet.

    Before the first report, that is the one to start from. After a report it is the checkpoint of that
    report, on every rank, also on those that had nothing to save: it waits for the other ranks to make the
    same report. Uploads in the background aren't waited for.
    """
    return current("get_checkpoint").checkpoint()


def get_context() -> TrainContext:
    """This worker's place in the run."""
    return current("get_context").context


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """All checkpoints of the run that are kept, with rank 0's metrics, in the order of
    ``Result.best_checkpoints``.

    Waits until the reports that this rank has made are committed or given up, uploads in the background
    included; at most ``timeout_s``, after which the list has what is committed by then. Without validation
    tasks both modes mean the same.
    """
    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise ConfigError(
            f"consistency_mode is {consistency_mode!r}",
            "give CheckpointConsistencyMode.COMMITTED or CheckpointConsistencyMode.VALIDATED",
            "get_all_reported_checkpoints.consistency_mode",
        )
    return current("get_all_reported_checkpoints").reported(timeout_s)


def should_checkpoint() -> bool:
    """Whether Everstep would like a checkpoint now: before a resize, a preemption, a stop."""
    return bool(current("should_checkpoint").want_checkpoint.ask())


def get_preemption_info() -> PreemptionInfo | None:
    """What is known of machines that will be taken away, or None."""
    return current("get_preemption_info").preemption.ask()
