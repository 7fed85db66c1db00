"""Writing to a folder so that a crash at any instant leaves either the old state or the new one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from everstep.errors import StorageAccessError, StorageError

_CHUNK = 4 << 20


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, not only the files' contents."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(folder: Path) -> None:
    """A folder that is the user's alone."""
    if not folder.parent.exists():
        make_private(folder.parent)
    folder.mkdir(exist_ok=True, mode=0o700)


def create(path: Path, data: bytes) -> bool:
    """Write a file that must not exist yet, durably. False if somebody else made it first."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def copy_durably(source: Path, target: Path) -> tuple[int, str, bool]:
    """Copy a file to a name that must not exist yet. Returns (size, SHA-256, whether the name was ours to
    take).
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    digest = hashlib.sha256()
    size = 0
    try:
        with source.open("rb") as src, temporary.open("xb") as out:
            while chunk := src.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
                size += len(chunk)
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(temporary, target)
            taken = True
        except FileExistsError:
            taken = False
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StorageError(
                f"no space left for {target}", "free some, or keep fewer checkpoints"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return size, digest.hexdigest(), taken


def files_below(folder: Path) -> Iterator[Path]:
    """Every regular file, as a path relative to ``folder``, in a stable order."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            yield (Path(root) / name).relative_to(folder)


def remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def check_writable(folder: Path) -> None:
    """Fail now, with the cause, rather than when the first checkpoint is saved."""
    probe = folder / f".everstep-probe-{secrets.token_hex(6)}"
    try:
        make_private(folder)
        probe.write_bytes(b"everstep")
        if create(probe, b"again"):
            raise StorageAccessError(f"storage_path {folder} does not refuse a file that exists already")
    except OSError as error:
        raise StorageAccessError(
            f"storage_path {folder} can't be written: {error.strerror or error}",
            "give RunConfig(storage_path=…) a folder that you may write to",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
