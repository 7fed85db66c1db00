"""Uploads that outlive their worker.

A report with ``ASYNC`` returns once its files are pinned by hard links and a job beside them says what is to
be done. The worker uploads them in the background; if it is killed, any other process of the host can
``finish`` the job instead, and comes to the same part.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import msgspec

from everstep.errors import StorageError
from everstep.saved.reports import Part
from everstep.storage.checkpoints import Share, upload_part
from everstep.storage.folder import Draft, files_below, make_private
from everstep.storage.restore import default_cache
from everstep.storage.store import Store

JOB = "job.json"
FORMAT = 1


class Pinned(msgspec.Struct, frozen=True):
    """A file as it was when the report was made."""

    path: str
    size: int
    modified_ns: int


class PendingUpload(msgspec.Struct, frozen=True):
    """An upload to be done. Credentials aren't in it: who does it brings the store."""

    run: str
    share: Share
    place: str
    files: list[Pinned]
    format: int = FORMAT


def default_spool() -> Path:
    """Where jobs lie by default."""
    return default_cache().parent / "spool"


def take(spool: Path, run: str, share: Share, source: Path, *, keep: bool) -> Path:
    """Pin a folder's files as they are now, and leave a job for their upload. Returns the job's path.

    Files are pinned under ``spool``; beside the source, where that is on another disk; and copied where there
    are no hard links. Without ``keep`` the source is removed.
    """
    home = spool / f"{share.folder}.{share.rank:05d}.{secrets.token_hex(4)}"
    make_private(home)
    relative = list(files_below(source))
    place = home / "files"
    try:
        try:
            _link(source, relative, place)
        except OSError as error:
            shutil.rmtree(place, ignore_errors=True)
            if error.errno == errno.EXDEV:
                place = Path(tempfile.mkdtemp(prefix=".everstep-snapshot-", dir=source.parent))
                _link(source, relative, place)
            elif error.errno in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EMLINK):
                _copy(source, relative, place)
            else:
                raise
        job = PendingUpload(run, share, str(place), [_pin(place, path) for path in relative])
        with Draft(home, named=True) as draft:
            draft.write(memoryview(msgspec.json.encode(job)))
            draft.replace(home / JOB, durable=False)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)
        raise StorageError(
            f"{source} can't be kept for its upload: {error.strerror or error}", f"look at {spool}"
        ) from error
    if not keep:
        shutil.rmtree(source, ignore_errors=True)
    return home / JOB


def finish(job: Path, store: Store) -> Part:
    """Do a job, or do it again, with the same part as result. ``forget`` it once the driver has the part."""
    what = read(job)
    _check_unchanged(what)
    return upload_part(store, what.share, Path(what.place), check=lambda: _check_unchanged(what))


def read(job: Path) -> PendingUpload:
    what = msgspec.json.decode(job.read_bytes(), type=PendingUpload)
    if what.format > FORMAT:
        raise StorageError(f"{job} was written by a newer Everstep", "let that one finish it")
    return what


def pending(spool: Path) -> list[Path]:
    """Jobs that are not done, or whose part the driver may not have, oldest first."""
    return sorted(spool.glob(f"*/{JOB}"), key=lambda job: job.stat().st_mtime_ns)


def forget(job: Path) -> None:
    """The driver has the part, or will never get it: let go of the files."""
    try:
        place = Path(read(job).place)
    except FileNotFoundError:
        return
    job.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(job.parent, ignore_errors=True)


def _link(source: Path, files: list[Path], place: Path) -> None:
    make_private(place)
    for path in files:
        make_private((place / path).parent)
        os.link(os.path.realpath(source / path), place / path)


def _copy(source: Path, files: list[Path], place: Path) -> None:
    for path in files:
        make_private((place / path).parent)
        shutil.copy2(source / path, place / path)


def _pin(place: Path, path: Path) -> Pinned:
    stat = (place / path).stat()
    return Pinned(path.as_posix(), stat.st_size, stat.st_mtime_ns)


def _check_unchanged(job: PendingUpload) -> None:
    """A hard link pins a file, not its contents: one that was written over since must not be uploaded as the
    old one, nor half of each.
    """
    for file in job.files:
        if _pin(Path(job.place), Path(file.path)) != file:
            raise StorageError(
                f"{file.path} was written over while it was being uploaded",
                "save each checkpoint into a new folder, or let report() remove it "
                "(delete_local_checkpoint_after_upload=True)",
            )
