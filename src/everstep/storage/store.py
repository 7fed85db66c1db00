"""What Everstep asks of the place where a run lives, whether that is a folder or a bucket.

``open_store`` makes one from an address. Folders are in ``folder.py``, buckets in ``bucket.py``. What is kept
in a store, and in which order it is written, is for ``checkpoints.py`` and the journal to say.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from everstep.deadlines import Deadlines
from everstep.errors import ConfigError, StorageAccessError, StorageError
from everstep.storage.schemes import BUCKETS, MEMORY

MAX_BUFFERS = 64 << 20
"""Bytes that one process holds in memory for transfers that run at the same time."""
PARALLEL_FILES = 4
"""Files that one process transfers at the same time."""


class FileRecord(msgspec.Struct, frozen=True):
    """A file that is in a store."""

    path: str
    size: int
    sha256: str
    """Empty where the bytes were not read (a checkpoint that Everstep didn't upload)."""


@dataclass(frozen=True)
class Limits:
    """A store's part of the ``Deadlines``."""

    operation_s: float = Deadlines.storage_s
    answer_s: float = Deadlines.storage_answer_s
    piece_s: float = Deadlines.storage_piece_s
    slowest_rate: float = 1 << 20
    """Bytes a second: a transfer gets ``operation_s`` and as long as its bytes take at this rate."""

    @classmethod
    def of(cls, deadlines: Deadlines) -> Limits:
        return cls(deadlines.storage_s, deadlines.storage_answer_s, deadlines.storage_piece_s)

    def transfer_s(self, size: int) -> float:
        return self.operation_s + size / self.slowest_rate


class Store(Protocol):
    """A flat namespace of objects, under one address. Keys are relative, with slashes.

    All calls block, and may be made from any thread. Each stays inside one deadline, in which it is tried
    again with growing, jittered pauses. Errors are ``StorageError``; where no retry can help (refused
    credentials, a bucket that isn't there, a folder that may not be written) ``StorageAccessError``.
    Stores pickle; their credentials go along.
    """

    @property
    def is_local(self) -> bool:
        """Whether ``address`` is a folder of this machine's file system."""
        ...

    def address(self, key: str = "") -> str:
        """What a user would write to name this place, or an object in it."""
        ...

    def child(self, prefix: str) -> Store:
        """The same store, seen from below."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Put an object that must not exist yet, durably. True: the object is there, and holds ``data``.

        False: it holds something else, which another writer has put there. If the answer got lost, the object
        is read back and compared. So where two writers must not both believe that theirs was first, ``data``
        has to contain a nonce of its writer.
        """
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Put an object over the one before, if any. For what is the user's to change; nothing else."""
        ...

    def read(self, key: str) -> bytes | None:
        """An object's bytes, or None if it isn't there."""
        ...

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]:
        """Every object below a prefix, in the order of keys, without digests. ``after``: only keys above it.

        A prefix is whole names: ``a`` has ``a/b`` below it, not ``ab``.
        """
        ...

    def folders(self, prefix: str = "") -> Sequence[str]:
        """The names that have something below them, one level down."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects. One that isn't there is no error."""
        ...

    def clear(self, prefix: str) -> None:
        """Remove everything below a prefix."""
        ...

    def upload(self, source: Path, key: str, owner: str, beside: int = 0) -> FileRecord | None:
        """Put a file, streamed, with its digest computed on the way. It is durable when this returns.

        The first owner to bring a key keeps it: for any other this gives None. The same owner may bring the
        same file again, say after a crash. ``beside``: how many other transfers run meanwhile, so that all
        of them stay within ``MAX_BUFFERS``.
        """
        ...

    def download(
        self,
        key: str,
        target: Path,
        expected: FileRecord | None = None,
        *,
        durable: bool = False,
        beside: int = 0,
    ) -> FileRecord:
        """Get a file, streamed. ``target`` appears when it is whole; what was there before is replaced.

        With ``expected``, its size and digest must be those, or ``DamagedCheckpointError`` is raised.
        """
        ...

    def digest(self, key: str) -> FileRecord | None:
        """Read an object through, and give its size and digest; None if it isn't there."""
        ...


def open_store(
    address: str | os.PathLike[str], options: Mapping[str, str] | None = None, limits: Limits | None = None
) -> Store:
    """The store in a folder, or at an address: ``file://``, or one of ``schemes``.

    ``options`` are credentials, endpoint, region and the like of a remote store, with the names that
    `obstore` and the clouds' own environment variables use; what isn't there is taken from the environment.
    """
    text = os.fspath(address)
    if "://" not in text:
        from everstep.storage.folder import FolderStore

        return FolderStore(Path(os.path.abspath(os.path.expanduser(text))))
    parts = urlsplit(text)
    if parts.scheme == "file":
        from everstep.storage.folder import FolderStore

        return FolderStore(Path(os.path.abspath(unquote(parts.path))))
    if parts.scheme not in (*BUCKETS, MEMORY) or not parts.netloc:
        *others, last = (scheme.example for scheme in BUCKETS.values())
        raise ConfigError(
            f"{text!r} is no address of a store",
            f"write a folder, file:///folder, {', '.join(others)} or {last}",
        )
    from everstep.storage.bucket import Bucket, BucketStore

    # Not parts.path: a ? or # is part of a key.
    prefix = text.split("://", 1)[1][len(parts.netloc) :].strip("/")
    return BucketStore(Bucket(parts.scheme, parts.netloc, dict(options or {}), limits or Limits()), prefix)


def probe(store: Store) -> None:
    """Check that a store can be written, and that it really refuses a second create: everything that must
    happen once stands on that. Fails now, with the cause, rather than at the first checkpoint.
    """
    key = f".everstep-probe-{secrets.token_hex(6)}"
    first, second = b"first " + key.encode(), b"second " + key.encode()
    try:
        if not store.create(key, first) or store.create(key, second) or store.read(key) != first:
            raise StorageAccessError(
                f"storage_path {store.address()} does not refuse an object that exists already",
                "use a store with conditional writes (If-None-Match: *), such as S3, Google Cloud Storage, "
                "Azure or MinIO",
            )
    except StorageError as error:
        with suppress(StorageError):  # the first error is the one to report
            store.delete([key])
        if store.is_local and isinstance(error.__cause__, FileNotFoundError):  # it was never there
            raise StorageAccessError(
                f"storage_path {store.address()} can't be created",
                "give RunConfig(storage_path=…) a folder that you may write to",
            ) from error.__cause__
        raise
    store.delete([key])


def checked_key(key: str) -> str:
    """A key that means the same in every store."""
    if not key or key.startswith("/") or any(part in ("", ".", "..") for part in key.split("/")):
        raise ConfigError(f"{key!r} can't name an object", "use names with single slashes between them")
    if not key.isprintable():
        raise ConfigError(f"{key!r} can't name an object", "use printable characters in names of files")
    return key
