"""Getting a committed checkpoint back, whole or not at all.

Every size and digest is compared with the manifest, once a host: the result is kept in a cache folder that
all worker processes of the host share, with each file's time stamps, so that a restart only reads the time
stamps and not the files. Digests are compared for folders, too: it costs about the time that reading the
files takes anyway, once, and a flipped bit is found in no other way.

A remote checkpoint is downloaded into the same cache. A copy is named after its manifest, too, so that for a
whole copy only the manifest is read. The address alone isn't enough: a run may be removed, and another one of
the same name started.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from everstep.errors import DamagedCheckpointError, StorageError
from everstep.process import kernel
from everstep.storage.checkpoints import MANIFEST, METADATA_FILE, Manifest, compare_listed, manifest_of
from everstep.storage.folder import Draft, FolderStore, compare, digest_of, files_below, make_private
from everstep.storage.private import no_room, private_folder, shared_temporary
from everstep.storage.store import PARALLEL_FILES, FileRecord, Store, open_store

logger = logging.getLogger("everstep")

WAIT_S = 3600.0
"""How long a process waits for another one of its host that is downloading."""
KEPT_COPIES = 2
"""Copies of each run that stay in the cache."""
WORTH_A_THREAD = 1 << 20
"""Bytes of a checkpoint from which on two threads read it faster than one."""
UNUSED_S = 7 * 24 * 3600.0
"""Copies that were not used for this long are removed, of all runs."""

_POLL_S = 0.02


def default_cache() -> Path:
    """Where copies of remote checkpoints lie by default: on a disk, and the user's alone."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    above = base
    while not above.exists():
        above = above.parent
    if os.access(above, os.W_OK):
        return base / "everstep" / "checkpoints"
    # A container whose user has no home. Others can write to the temporary folder, too: ours must be private.
    shared = shared_temporary() / f"everstep-cache-{os.getuid()}"
    return private_folder(shared, "XDG_CACHE_HOME") / "checkpoints"


def verify(checkpoint: Store, *, digests: bool = True) -> Manifest:
    """Compare a checkpoint with its manifest. Raises ``DamagedCheckpointError``, which names the first file
    that is missing, truncated or changed. Files that were added are named in a warning.

    What Everstep didn't upload (``Manifest.external``) isn't compared.
    """
    manifest = _manifest(checkpoint)
    if manifest.external is not None:
        return manifest
    sizes = {file.path: file for file in checkpoint.list()}
    for expected in _compared(manifest):
        compare_listed(checkpoint, expected, sizes)
    added = sorted(_visible(sizes) - {file.path for file in manifest.files})
    if added:
        # What was saved is all there: a lock file that a reader left is no reason to give it up.
        named = ", ".join(added[:3]) + (f" and {len(added) - 3} more" if len(added) > 3 else "")
        logger.warning("checkpoint %s: %s was added after it was committed", checkpoint.address(), named)

    def check(expected: FileRecord) -> None:
        found = checkpoint.digest(expected.path)
        if found is None:
            raise DamagedCheckpointError(checkpoint.address(), expected.path, "is missing")
        compare(checkpoint.address(), expected, found)

    if digests and sum(file.size for file in manifest.files) > WORTH_A_THREAD:
        with ThreadPoolExecutor(2, thread_name_prefix="everstep-verify") as pool:
            for _ in pool.map(check, _compared(manifest)):
                pass
    elif digests:
        for file in _compared(manifest):
            check(file)
    return manifest


def read(
    checkpoint: Store, wanted: Callable[[str], bool], options: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """Small files of a checkpoint, by path, each compared with its record."""
    manifest = _manifest(checkpoint)
    place = checkpoint if manifest.external is None else open_store(manifest.external, options)
    found = {}
    for expected in manifest.files:
        if wanted(expected.path):
            data = place.read(expected.path)
            if data is None:
                raise DamagedCheckpointError(checkpoint.address(), expected.path, "is missing")
            record = FileRecord(expected.path, len(data), hashlib.sha256(data).hexdigest())
            compare(checkpoint.address(), expected, record)
            found[expected.path] = data
    return found


@contextmanager
def borrow(checkpoint: Store, cache: Path) -> Iterator[Path]:
    """A folder with the checkpoint's files, verified: the checkpoint's own, or a copy of a remote one, which
    stays for as long as the context lasts. Treat it as read-only.

    All processes of a host that give the same ``cache`` share the work; if one is killed at it, the next goes
    on from the files that are whole.
    """
    entry = _Entry(checkpoint, cache)
    with ExitStack() as held:
        try:
            make_private(cache)
            held.enter_context(_lock(entry.using, fcntl.LOCK_SH))
            with _lock(entry.filling, fcntl.LOCK_EX):
                if entry.is_verified():
                    os.utime(entry.mark)
                else:
                    manifest = _fill(checkpoint, entry.place)
                    entry.remember(manifest)
            if not checkpoint.is_local:
                _evict(cache, entry)
        except OSError as error:
            if not checkpoint.is_local:
                raise no_room(cache, error, "XDG_CACHE_HOME") from error
            verify(checkpoint)  # the result can't be kept: each process verifies for itself, then
        yield entry.place


def copy_out(checkpoint: Store, target: Path, *, committed: bool = False) -> None:
    """Copy a checkpoint's files into a folder of the user's, verified where there is a manifest. One that is
    ``committed`` has one. A remote one is downloaded once a host, and copied from there.
    """
    manifest = _manifest(checkpoint) if committed else manifest_of(checkpoint)
    if manifest is None:
        files = list(checkpoint.list())
        if not files and not checkpoint.is_local:
            raise StorageError(
                f"There is no checkpoint at {checkpoint.address()}", "check the address, and its credentials"
            )
        _download(checkpoint, files, target)
    elif checkpoint.is_local:
        _fill_copy(checkpoint, manifest, target)
    else:
        with borrow(checkpoint, default_cache()) as place:
            _copy_files(FolderStore(place), manifest, target)
        _copy_metadata(checkpoint, target)


# ---------------------------------------------------------------------- filling


def _fill(checkpoint: Store, place: Path) -> Manifest:
    if checkpoint.is_local:
        return verify(checkpoint)
    make_private(place)
    manifest = _manifest(checkpoint)
    _fill_copy(checkpoint, manifest, place)
    # The copy is a checkpoint like any other: `ls` shows the same, and it can be moved elsewhere.
    checkpoint.download(MANIFEST, place / MANIFEST)
    return manifest


def _fill_copy(checkpoint: Store, manifest: Manifest, place: Path) -> None:
    _copy_files(checkpoint, manifest, place)
    _copy_metadata(checkpoint, place)


def _copy_files(checkpoint: Store, manifest: Manifest, place: Path) -> None:
    missing = [file for file in _compared(manifest) if not _is_there(place, file)]
    _download(checkpoint, missing, place)


def _copy_metadata(checkpoint: Store, place: Path) -> None:
    """As it is now: users may change it at any time."""
    metadata = checkpoint.read(METADATA_FILE)
    if metadata is not None:
        with Draft(place, named=True, mode=0o666) as draft:
            draft.write(memoryview(metadata))
            draft.replace(place / METADATA_FILE, durable=False)


def _download(checkpoint: Store, files: list[FileRecord], place: Path) -> None:
    at_once = max(1, min(PARALLEL_FILES, len(files)))
    get = partial(checkpoint.download, beside=at_once - 1)
    place.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once, thread_name_prefix="everstep-restore") as pool:
        futures = [pool.submit(get, file.path, place / file.path, file) for file in files]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _is_there(place: Path, expected: FileRecord) -> bool:
    """Whether a file is in a folder already, from an attempt that was cut short."""
    path = place / expected.path
    try:
        return path.stat().st_size == expected.size and digest_of(path)[1] == expected.sha256
    except FileNotFoundError:
        return False


def _manifest(checkpoint: Store) -> Manifest:
    manifest = manifest_of(checkpoint)
    if manifest is None:
        raise DamagedCheckpointError(checkpoint.address(), MANIFEST, "is missing")
    return manifest


def _compared(manifest: Manifest) -> list[FileRecord]:
    """All but what users may change at any time (``Checkpoint.set_metadata``): that is copied as it is."""
    return [file for file in manifest.files if file.path != METADATA_FILE]


def _visible(paths: Iterable[str]) -> set[str]:
    """All but what has a name that begins with a dot: file systems and tools leave such files everywhere."""
    return {path for path in paths if not any(part.startswith(".") for part in path.split("/"))}


# ---------------------------------------------------------------------- what this host knows


class _TimeStamps(msgspec.Struct, frozen=True):
    """A file as it was when its digest was compared."""

    path: str
    size: int
    modified_ns: int
    inode: int


class _Verified(msgspec.Struct, frozen=True):
    address: str
    boot: str
    """Copies aren't synced: after a reboot nothing is taken for granted."""
    files: list[_TimeStamps]


class _Entry:
    """One checkpoint in the cache."""

    def __init__(self, checkpoint: Store, cache: Path) -> None:
        self._address = checkpoint.address()
        run, _, folder = self._address.rpartition("/")
        self.run = hashlib.sha256(run.encode()).hexdigest()[:12]
        which = folder.encode() if checkpoint.is_local else folder.encode() + _manifest_bytes(checkpoint)
        name = f"{self.run}-{hashlib.sha256(which).hexdigest()[:12]}"
        self.place = Path(self._address) if checkpoint.is_local else cache / name
        self.mark = cache / f"{name}.verified"
        self.filling = cache / f"{name}.filling"
        self.using = cache / f"{name}.using"

    def is_verified(self) -> bool:
        try:
            mark = msgspec.json.decode(self.mark.read_bytes(), type=_Verified)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return False
        return (
            mark.address == self._address
            and mark.boot == kernel.boot_id()
            and all(_time_stamps(self.place, file.path) == file for file in mark.files)
            and _visible(map(Path.as_posix, files_below(self.place, odd=False)))
            <= {file.path for file in mark.files}
        )

    def remember(self, manifest: Manifest) -> None:
        paths = [MANIFEST, *(file.path for file in _compared(manifest))]
        if manifest.external is not None:
            paths = [MANIFEST]
        seen = [_time_stamps(self.place, path) for path in paths]
        mark = _Verified(self._address, kernel.boot_id(), [file for file in seen if file is not None])
        with Draft(self.mark.parent, named=True) as draft:
            draft.write(memoryview(msgspec.json.encode(mark)))
            draft.replace(self.mark, durable=False)


def _manifest_bytes(checkpoint: Store) -> bytes:
    manifest = checkpoint.read(MANIFEST)
    if manifest is None:
        raise DamagedCheckpointError(checkpoint.address(), MANIFEST, "is missing")
    return manifest


def _time_stamps(place: Path, path: str) -> _TimeStamps | None:
    try:
        stat = (place / path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _TimeStamps(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def _evict(cache: Path, current: _Entry) -> None:
    """Remove copies that nobody uses: older ones of the same run, and those of runs long gone."""
    marks = []
    for mark in cache.glob("*.verified"):
        try:
            marks.append((mark.stat().st_mtime, mark))
        except FileNotFoundError:
            continue  # another process of this host evicts, too
    marks.sort(reverse=True)
    of_this_run = [mark for _, mark in marks if mark.name.startswith(current.run)]
    surplus = [mark for mark in of_this_run[KEPT_COPIES:] if mark != current.mark]
    surplus += [mark for at, mark in marks if at < time.time() - UNUSED_S and mark != current.mark]
    for mark in surplus:
        try:
            with _lock(mark.with_suffix(".using"), fcntl.LOCK_EX, wait_s=0.0):
                mark.unlink(missing_ok=True)  # first: half a copy never looks whole
                shutil.rmtree(mark.with_suffix(""), ignore_errors=True)
        except StorageError:
            continue  # somebody reads it


@contextmanager
def _lock(path: Path, kind: int, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold a lock that the kernel lets go of when this process dies, however it does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StorageError(
                        f"another process of this host has held {path} for {wait_s:.0f} s",
                        "see what it is downloading, or end it",
                    ) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)
