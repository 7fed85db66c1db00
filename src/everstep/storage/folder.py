"""A store in a folder: a crash at any instant leaves either the old state or the new one.

Files and the folders that name them are synced before anything counts. A new file has no name until it is
whole, so a process that is killed while it writes leaves nothing behind (where the file system has no unnamed
files: a hidden draft that no listing shows).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import ConfigError, DamagedCheckpointError, StorageAccessError, StorageError
from everstep.storage.schemes import any_bucket
from everstep.storage.store import FileRecord, checked_key
from everstep.storage.stream import pump

_DRAFT = ".everstep-draft-"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True)
class FolderStore:
    """A ``Store`` (see there) in a folder, which may be one that several hosts share.

    Nothing is tried again here: what a disk refuses once it refuses twice, and the kernel itself waits for a
    network that went away.
    """

    root: Path

    @property
    def is_local(self) -> bool:
        return True

    def address(self, key: str = "") -> str:
        return str(self.root / key) if key else str(self.root)

    def child(self, prefix: str) -> FolderStore:
        return FolderStore(self.root / checked_key(prefix))

    def create(self, key: str, data: bytes) -> bool:
        target = self._path(key)
        with _while_writing(target):
            make_private(target.parent)
            with Draft(target.parent) as draft:
                draft.write(memoryview(data))
                created = draft.publish(target)
            if not created and target.read_bytes() != data:
                return False
            self._sync_up(target.parent)
            return True

    def replace(self, key: str, data: bytes) -> None:
        target = self._path(key)
        with _while_writing(target):
            make_private(target.parent)
            with Draft(target.parent, named=True) as draft:
                draft.write(memoryview(data))
                draft.replace(target)
            self._sync_up(target.parent)

    def read(self, key: str) -> bytes | None:
        target = self._path(key)
        try:
            with _as_storage_errors(target), _nothing_below_a_file():
                return target.read_bytes()
        except FileNotFoundError:
            return None

    def exists(self, key: str) -> bool:
        target = self._path(key)
        try:
            # Not is_file(), which says False for anything that a disk may answer (from Python 3.14 on).
            with _as_storage_errors(target), _nothing_below_a_file():
                return stat.S_ISREG(target.stat().st_mode)
        except FileNotFoundError:
            return False

    def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]:
        top = self._path(prefix) if prefix else self.root
        with _as_storage_errors(top):
            # What was removed since it was listed may have been replaced by what wasn't: look again.
            while (found := self._files_now(top, after)) is None:
                pass
        return sorted(found, key=lambda record: record.path)

    def _files_now(self, top: Path, after: str) -> Sequence[FileRecord] | None:
        found = []
        for relative in files_below(top, odd=False):
            key = (top / relative).relative_to(self.root).as_posix()
            if key > after:
                try:
                    found.append(FileRecord(key, (top / relative).stat().st_size, ""))
                except FileNotFoundError:
                    if not os.path.lexists(top / relative):
                        return None
        return found

    def folders(self, prefix: str = "") -> Sequence[str]:
        top = self._path(prefix) if prefix else self.root
        try:
            with _as_storage_errors(top), os.scandir(top) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def delete(self, keys: Iterable[str]) -> None:
        changed = set()
        for key in keys:
            target = self._path(key)
            with _as_storage_errors(target):
                try:
                    target.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    continue
                changed.add(target.parent)
        for parent in changed:
            _sync_unless_gone(parent)

    def clear(self, prefix: str) -> None:
        target = self._path(prefix)
        with _as_storage_errors(target):
            if target.is_symlink():  # the folder that it leads to isn't ours
                target.unlink()
            while target.is_dir():
                try:
                    shutil.rmtree(target)
                except FileNotFoundError:
                    continue  # another process removes it, too
                _sync_unless_gone(target.parent)

    def upload(self, source: Path, key: str, owner: str, beside: int = 0) -> FileRecord | None:
        target = self._path(key)
        with source.open("rb", buffering=0) as stream, _while_writing(target):
            make_private(target.parent)
            with Draft(target.parent) as draft:
                size, digest = pump(stream, draft.write, source.stat().st_size)
                created = draft.publish(target)
            # Taken: by us before a crash, if the bytes are the same; else by another writer.
            if not created and (target.stat().st_size != size or digest_of(target)[1] != digest):
                return None
            self._sync_up(target.parent)
        return FileRecord(key, size, digest)

    def download(
        self,
        key: str,
        target: Path,
        expected: FileRecord | None = None,
        *,
        durable: bool = False,
        beside: int = 0,
    ) -> FileRecord:
        source = self._path(key)
        try:
            with _as_storage_errors(source):
                stream = source.open("rb", buffering=0)
        except FileNotFoundError:
            raise DamagedCheckpointError(self.address(), key, "is missing") from None
        with stream, draft_of(target) as draft:
            size, digest = pump(stream, draft.write)
            found = FileRecord(key, size, digest)
            compare(self.address(), expected, found)
            draft.replace(target, durable=durable)
        return found

    def digest(self, key: str) -> FileRecord | None:
        try:
            with _as_storage_errors(self._path(key)):
                return FileRecord(key, *digest_of(self._path(key)))
        except FileNotFoundError:
            return None

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _sync_up(self, folder: Path) -> None:
        """Make a name durable, and those of the folders that it is in. Also those that another process has
        made: it may not have come to that yet.
        """
        while True:
            sync_folder(folder)
            if folder == self.root:
                return
            folder = folder.parent


class Draft:
    """A file on its way to a name, in that name's folder. Gone at the end of the context unless published."""

    def __init__(self, folder: Path, *, named: bool = False, mode: int = 0o600) -> None:
        self._folder = folder
        self._name: Path | None = None
        self._fd = -1
        if not named and hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
            try:
                self._fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, mode)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
        if self._fd < 0:
            self._name = folder / f"{_DRAFT}{secrets.token_hex(8)}"
            self._fd = os.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if self._name is not None:
            self._name.unlink(missing_ok=True)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def publish(self, target: Path) -> bool:
        """Give the file its name, durable bytes first. False if the name is taken."""
        os.fsync(self._fd)
        try:
            if self._name is not None:
                os.link(self._name, target)
            else:
                # With a folder given, and only then, Python follows the link in /proc to the unnamed file.
                folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.link(f"/proc/self/fd/{self._fd}", target, src_dir_fd=folder)
                finally:
                    os.close(folder)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StorageAccessError(
                    f"the file system of {target.parent} has no hard links ({error.strerror}), without which "
                    "a file can't be made exactly once",
                    f"use another folder; for a mounted bucket, its {any_bucket()} address",
                ) from error
            raise
        return True

    def replace(self, target: Path, *, durable: bool = True) -> None:
        """Give the file its name, over what has that name now."""
        assert self._name is not None, "only a named draft can take a name that is in use"
        if durable:
            os.fsync(self._fd)
        self._name.rename(target)
        if durable:
            sync_folder(target.parent)


@contextmanager
def draft_of(target: Path) -> Iterator[Draft]:
    """A draft beside a file of the user's; errors are raised as a store's are."""
    with _as_storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with Draft(target.parent, named=True, mode=0o666) as draft:
            yield draft


def compare(checkpoint: str, expected: FileRecord | None, found: FileRecord) -> None:
    """Whether a file is what its record says."""
    if expected is None:
        return
    if found.size != expected.size:
        raise DamagedCheckpointError(
            checkpoint, expected.path, f"has {found.size} bytes, {expected.size} were saved"
        )
    if expected.sha256 and found.sha256 and found.sha256 != expected.sha256:
        raise DamagedCheckpointError(checkpoint, expected.path, "has other contents than were saved")


def digest_of(path: Path) -> tuple[int, str]:
    """(size, SHA-256)."""
    with path.open("rb", buffering=0) as stream:
        return pump(stream, len, path.stat().st_size)


def files_below(folder: Path, *, odd: bool = True) -> Iterator[Path]:
    """Every file below a folder, as a path relative to it, in a stable order. Links are followed. A folder
    that can't be listed is an error: nothing is left out in silence. Drafts, which a process that was killed
    has left, are nobody's files. ``odd``: a socket or the like is an error, too, since it can't be saved.
    """
    above: dict[str, frozenset[str]] = {}
    """What each folder lies in, on the way that was taken to it, without links."""
    for root, folders, names in os.walk(folder, followlinks=True, onerror=_unless_gone):
        real, holders = os.path.realpath(root), above.pop(root, frozenset())
        if real in holders:
            folders.clear()  # a link that leads back up
            continue
        above.update((os.path.join(root, name), holders | {real}) for name in folders)
        folders.sort()
        for name in sorted(names):
            if name.startswith(_DRAFT):
                continue
            path = Path(root) / name
            try:
                is_plain = stat.S_ISREG(path.stat().st_mode)
            except FileNotFoundError:
                is_plain = True  # removed meanwhile: who reads it will see
            if is_plain:
                yield path.relative_to(folder)
            elif odd:
                raise ConfigError(
                    f"{path} is neither a file nor a folder", "save plain files in a checkpoint's folder"
                )


def _unless_gone(error: OSError) -> None:
    """What isn't there has no files. Anything else would look like that, too, and isn't."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, not only the files' contents."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_unless_gone(folder: Path) -> None:
    """Make a removal durable. Of a folder that was removed meanwhile no names are left to keep."""
    with _as_storage_errors(folder), suppress(FileNotFoundError):
        sync_folder(folder)


def make_private(folder: Path) -> None:
    """A folder that is the user's alone, with its name made durable."""
    if folder.is_dir():
        return
    make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    sync_folder(folder.parent)


@contextmanager
def _as_storage_errors(path: Path) -> Iterator[None]:
    """The system's errors as ours. That something isn't there is for the caller to judge."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StorageError(f"no space left for {path}", "free some, or keep fewer checkpoints") from error
        if error.errno in _REFUSED:
            raise StorageAccessError(
                f"storage_path {path} can't be written or read: {error.strerror}",
                "give RunConfig(storage_path=…) a folder that you may write to",
            ) from error
        raise StorageError(
            f"{path}: {error.strerror or error}", "look at the disk, or use another"
        ) from error


@contextmanager
def _nothing_below_a_file() -> Iterator[None]:
    """A file is in a folder's place: what was in the folder isn't there."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError from error


@contextmanager
def _while_writing(path: Path) -> Iterator[None]:
    """The same, where a missing folder was removed by another process. It may be tried again."""
    try:
        with _as_storage_errors(path):
            yield
    except FileNotFoundError as error:
        raise StorageError(
            f"{path.parent} was removed while {path.name} was written",
            "leave the folder of a run alone while it runs",
        ) from error
