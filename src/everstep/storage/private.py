"""Folders of this user's alone, in places where others may write, too."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from everstep.errors import StorageAccessError, StorageError

SHARED_TEMPORARY = "EVERSTEP_SHARED_TMPDIR"
"""Set in workers, whose ``TMPDIR`` is each one's own: the temporary folder that all processes share."""


def shared_temporary() -> Path:
    return Path(os.environ.get(SHARED_TEMPORARY) or tempfile.gettempdir())


def private_folder(folder: Path, variable: str) -> Path:
    """Make it, or check that it is ours: a folder, not a link to one, that nobody else can read. Another user
    may have made one of this name. ``variable`` is what a user can set to have another.
    """
    remedy = f"remove it, or set {variable} to a folder of yours"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise no_room(folder, error, variable) from error
    if not stat.S_ISDIR(facts.st_mode):
        raise StorageAccessError(f"{folder} is a link or a file, and should be a folder", remedy)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise StorageAccessError(f"{folder} is not this user's alone (0700)", remedy)
    return folder


def no_room(folder: Path, error: OSError, variable: str) -> StorageError:
    """An error of the system, with what can be done about it."""
    if error.errno == errno.EEXIST:
        return StorageAccessError(
            f"{folder} is a link or a file, and should be a folder", f"remove it, or set {variable}"
        )
    return StorageError(
        f"{folder} can't be written to: {error.strerror or error}",
        f"make room there, or set {variable} to a folder that has some",
    )
