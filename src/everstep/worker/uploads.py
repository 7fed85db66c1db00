"""The way of a worker's part of a checkpoint: into storage, and until the driver has committed it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from everstep.checkpoint import Checkpoint
from everstep.errors import ConfigError, StorageError, UnequalReportsError
from everstep.protocol import framing, wire, worker_messages
from everstep.snapshots.segments import Slot
from everstep.snapshots.writing import write
from everstep.storage import checkpoints, pending_uploads
from everstep.storage.background import BackgroundUploads
from everstep.storage.sources import overlap
from everstep.storage.store import Store

if TYPE_CHECKING:
    from everstep.saved.reports import Part

MAX_UNCOMMITTED = 16
"""Checkpoints of one rank that may wait for other ranks, before ``report`` waits."""


class Uploads:
    """This rank's parts. Failures are sent to the driver: then there is no such checkpoint."""

    def __init__(self, spec: wire.WorkerSpec, store: Store, send: Callable[[bytes], None]) -> None:
        self._spec = spec
        self._store = store
        self._send = send
        self._rank = spec.member.rank
        self._group = spec.member.group_id if spec.member.group_size != spec.member.world_size else None
        self._spool = Path(spec.spool) if spec.spool else pending_uploads.default_spool()
        self._background = BackgroundUploads()
        self._error: BaseException | None = None
        """Of the user's own function."""

    def share(
        self, folder: str, index: int, metrics: msgspec.Raw, validation: bytes = b""
    ) -> checkpoints.Share:
        spec = self._spec
        return checkpoints.Share(
            folder,
            self._rank,
            spec.epoch,
            index,
            spec.member.group_id,
            spec.generation,
            spec.member.group_size,
            bytes(metrics) if spec.member.group_rank == 0 else b"",
            validation,
        )

    def pin(self, share: checkpoints.Share, checkpoint: Checkpoint, keep: bool) -> Path:
        """What is to be uploaded survives this process from here on. Returns the job that says so."""
        return pending_uploads.take(
            self._spool, self._store.address(), share, local_folder(checkpoint), keep=keep
        )

    def note(self, share: checkpoints.Share, checkpoint: Checkpoint) -> Part:
        return checkpoints.note_external(self._store, share, checkpoint.path, self._spec.storage_options)

    def by_function(
        self,
        upload_fn: Callable[[Checkpoint, str], Checkpoint],
        checkpoint: Checkpoint,
        share: checkpoints.Share,
        delete_local: bool,
    ) -> Part:
        """Let the user's function upload it, and note where it says that it has."""
        done = upload_fn(checkpoint, share.folder)
        if not isinstance(done, Checkpoint):
            raise ConfigError(
                f"checkpoint_upload_fn returned a {kind_of(done)}, expected an everstep.Checkpoint",
                "return everstep.Checkpoint(path) with the place that it has uploaded to",
            )
        part = self.note(share, done)
        is_elsewhere = "://" in done.path or not overlap(Path(done.path), Path(checkpoint.path))
        if delete_local and is_elsewhere:
            shutil.rmtree(checkpoint.path, ignore_errors=True)
        return part

    def later(self, upload: Callable[[], Part], index: int, held: bool, job: Path | None) -> None:
        """Tell the driver of the part once it is there. ``job``: its pinned files, if it has any."""
        self._background.submit(partial(self._upload, upload, index, held, job))

    def wait(self) -> None:
        """Until all is there."""
        self._background.wait()

    def _upload(self, upload: Callable[[], Part], index: int, held: bool, job: Path | None) -> None:
        try:
            part = upload()
        except BaseException as error:  # also sys.exit(): it must reach the driver, not end with this thread
            self.failed(index, error)
            if job is None:  # the user's own function: as if it had been called in report()
                self._error = error
        else:
            self._send(framing.frame(worker_messages.PartDone(msgspec.structs.replace(part, held=held))))
        finally:
            if job is not None:
                pending_uploads.forget(job)

    def raise_failed(self) -> None:
        """What a function of the user's raised in the background is raised in the foreground."""
        error, self._error = self._error, None
        if error is not None and not isinstance(error, StorageError):
            raise error

    def failed(self, index: int, error: BaseException) -> None:
        self._send(framing.frame(worker_messages.PartFailed(index, framing.described(error))))

    def folder(self, name: str | None, index: int) -> str:
        spec = self._spec
        if name is None:
            return checkpoints.folder_name(spec.epoch, index, self._group, spec.generation)
        incarnation = (
            f"e{spec.epoch}" if self._group is None else f"e{spec.epoch}g{self._group}.{spec.generation}"
        )
        return checkpoints.claim_name(self._store, name, incarnation, index, self._rank)

    def store_here(self, slot: Slot, share: checkpoints.Share, held: bool, done: Callable[[], None]) -> None:
        """Write a snapshot to storage from this process, where there is no agent that does."""

        def upload() -> Part:
            try:
                return write(self._store, share, slot, with_shared=self._spec.member.group_rank == 0)
            finally:
                done()

        self.later(upload, share.index, held, None)


class UncommittedReports:
    """The reports with a checkpoint that is neither committed nor given up."""

    def __init__(self, spec: wire.WorkerSpec) -> None:
        self._spec = spec
        self._uncommitted: list[int] = []
        self._committed = threading.Condition()
        self._undriven = False

    def wait_for_the_others(self, index: int) -> None:
        """A rank may be some checkpoints ahead of the others, not any number."""
        deadline = time.monotonic() + self._spec.report_wait_s
        with self._committed:
            # Without a driver nothing is committed: then the agent's buffers are what bounds it.
            while len(self._uncommitted) >= MAX_UNCOMMITTED and not self._undriven:
                left = deadline - time.monotonic()
                if left <= 0 or not self._committed.wait(left):
                    raise UnequalReportsError(
                        f"rank {self._spec.member.rank} has {MAX_UNCOMMITTED} checkpoints that are not "
                        f"committed after {self._spec.report_wait_s:g} s (Deadlines.report_wait_s): other "
                        "ranks have not reported them, or storage takes no manifest, as the driver says then"
                    )
            self._uncommitted.append(index)

    def hold(self, index: int) -> None:
        """If the workers change over, they are ended in here, so that no step is made in vain; else training
        goes on once the checkpoint is committed.
        """
        with self._committed:
            self._committed.wait_for(
                lambda: index not in self._uncommitted or self._undriven, self._spec.hold_s
            )

    def committed(self, index: int) -> None:
        """The driver has committed the checkpoint of this report, or given it up."""
        with self._committed:
            self._uncommitted = [k for k in self._uncommitted if k > index]
            self._committed.notify_all()

    def undriven(self, now: bool) -> None:
        with self._committed:
            self._undriven = now
            self._committed.notify_all()


def kind_of(given: object) -> str:
    kind = type(given)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def local_folder(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint that is to be uploaded."""
    if "://" in checkpoint.path:
        raise ConfigError(
            f"report(checkpoint={checkpoint!r}) is in remote storage already",
            "report it with checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD",
        )
    if not Path(checkpoint.path).is_dir():
        raise ConfigError(
            f"report(checkpoint={checkpoint!r}): there is no such folder on this host",
            "report a checkpoint before its temporary folder is removed",
        )
    return Path(checkpoint.path)
