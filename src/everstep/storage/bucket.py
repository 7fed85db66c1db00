"""A store in a bucket: S3, Google Cloud Storage, Azure, or this process's memory, through ``obstore``.

``obstore`` is imported when a store is first used, never before: workers are forked from a process that must
not have its threads.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from everstep.errors import DamagedCheckpointError, StorageAccessError, StorageError
from everstep.storage.folder import compare, digest_of, draft_of
from everstep.storage.retry import attempts
from everstep.storage.schemes import BUCKETS, MEMORY
from everstep.storage.store import MAX_BUFFERS, FileRecord, Limits, checked_key

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

logger = logging.getLogger("everstep")

PIECE = 8 << 20
"""Files up to this size go in one request. Larger ones go, and all come, in pieces of it, or of more where a
file would have more pieces than stores allow.
"""
MOST_PIECES = 9_000

_CLIENT_OPTIONS = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
}
_NO_BUCKET = tuple(text for scheme in BUCKETS.values() for text in scheme.no_bucket)
_NO_CREDENTIALS = tuple(text for scheme in BUCKETS.values() for text in scheme.no_credentials)
_NO_REQUEST = ("builder error",)
_DENIED = ("403 Forbidden", "401 Unauthorized")
_LASTING = (*_NO_BUCKET, *_NO_CREDENTIALS, *_NO_REQUEST, *_DENIED)

_memories: dict[str, Any] = {}
_opening = threading.Lock()

Found = TypeVar("Found")


class Bucket:
    """Where, and with what credentials. Shared by the stores at its prefixes, and opened once a process."""

    def __init__(self, scheme: str, name: str, options: Mapping[str, str], limits: Limits) -> None:
        self.scheme = scheme
        self.name = name
        self.limits = limits
        self._options = dict(options)
        self._opened: dict[float, ObjectStore] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": {}}

    @property
    def objects(self) -> ObjectStore:
        """For small objects: one that is slow to answer has stalled."""
        return self._within(self.limits.answer_s)

    @property
    def files(self) -> ObjectStore:
        """For pieces of files, which take longer."""
        return self._within(self.limits.piece_s)

    def _within(self, timeout_s: float) -> ObjectStore:
        with _opening:
            if timeout_s not in self._opened:
                self._opened[timeout_s] = self._open(timeout_s)
            return self._opened[timeout_s]

    def _open(self, timeout_s: float) -> ObjectStore:
        from obstore import exceptions, store as stores

        if self.scheme == MEMORY:
            opened: ObjectStore = _memories.setdefault(self.name, stores.MemoryStore())
            return opened
        kind: Any = getattr(stores, BUCKETS[self.scheme].store)
        timeout = timedelta(seconds=timeout_s)
        client: ClientConfig = {"timeout": timeout, "connect_timeout": min(timeout, timedelta(seconds=5))}
        config: dict[str, str] = {}
        prefix = BUCKETS[self.scheme].environment
        # Giving any of a client's options makes obstore forget those in the environment.
        around = {name: os.environ.get(f"{prefix}{name.upper()}") for name in _CLIENT_OPTIONS}
        given = {name: value for name, value in around.items() if value is not None} | self._options
        for name, value in given.items():
            plain = name.lower().removeprefix(prefix.lower())
            if plain in _CLIENT_OPTIONS:
                client[plain] = value  # type: ignore[literal-required]
            else:
                config[name] = value
        # Retries are ours, and have one deadline; a few quick ones below them keep one bad answer in a
        # hundred pieces from sending all of a file again.
        retry = {
            "max_retries": 4,
            "retry_timeout": timedelta(seconds=self.limits.operation_s / 2),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        }
        try:
            made: ObjectStore = kind(self.name, config=config, client_options=client, retry_config=retry)
        except (exceptions.BaseError, ValueError) as error:
            raise StorageAccessError(
                f"{self.scheme}://{self.name} can't be opened: {_first_line(error)}",
                f"look at RunConfig(storage_options=…) and the environment's {prefix}* variables",
            ) from error
        return made

    def refused(self, what: str, error: Exception) -> StorageAccessError:
        """The error for a request that will be refused again."""
        text = str(error)
        if any(word in text for word in _NO_BUCKET):
            remedy = f"make the bucket {self.name} first, or correct its name"
        elif any(word in text for word in _NO_CREDENTIALS):
            remedy = (
                "no credentials were found: set the "
                f"{BUCKETS[self.scheme].environment}* environment variables, or RunConfig(storage_options=…)"
            )
        elif any(word in text for word in _NO_REQUEST):
            remedy = "check the endpoint; for one at http://, set the option allow_http to true"
        else:
            remedy = (
                "check that these credentials may read, write, list and delete there: "
                f"{BUCKETS[self.scheme].environment}* environment variables or RunConfig(storage_options=…)"
            )
        return StorageAccessError(f"{what}: {_first_line(error)}", remedy)


class BucketStore:
    """A ``Store`` (see there) at a prefix of a bucket."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"BucketStore({self.address()!r})"

    @property
    def is_local(self) -> bool:
        return False

    def address(self, key: str = "") -> str:
        return "/".join(filter(None, (f"{self._bucket.scheme}://{self._bucket.name}", self._prefix, key)))

    def child(self, prefix: str) -> BucketStore:
        return BucketStore(self._bucket, self._key(prefix))

    def create(self, key: str, data: bytes) -> bool:
        import obstore

        def put() -> bool:
            try:
                obstore.put(self._objects, self._key(key), data, mode="create", use_multipart=False)
            except obstore.exceptions.AlreadyExistsError:
                # Ours, if an answer was lost: by the network, or inside a retry that we didn't see.
                there = obstore.get(self._objects, self._key(key))
                return there.meta["size"] == len(data) and there.bytes().to_bytes() == data
            return True

        return self._try("create", key, put)

    def replace(self, key: str, data: bytes) -> None:
        import obstore

        self._try("write", key, lambda: obstore.put(self._objects, self._key(key), data, use_multipart=False))

    def read(self, key: str) -> bytes | None:
        return self._try("read", key, lambda: self._get(key))

    def exists(self, key: str) -> bool:
        import obstore

        def head() -> bool:
            try:
                obstore.head(self._objects, self._key(key))
            except FileNotFoundError:
                return False
            return True

        return self._try("look at", key, head)

    def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]:
        import obstore

        def collect() -> Sequence[FileRecord]:
            below = self._key(prefix) if prefix else self._prefix
            offset = self._key(after) if after else None
            found = obstore.list(self._objects, below or None, offset=offset).collect()
            skip = len(self._prefix) + 1 if self._prefix else 0
            return sorted((FileRecord(m["path"][skip:], m["size"], "") for m in found), key=lambda f: f.path)

        return self._try("list", prefix, collect)

    def folders(self, prefix: str = "") -> Sequence[str]:
        import obstore

        def collect() -> Sequence[str]:
            below = self._key(prefix) if prefix else self._prefix
            found = obstore.list_with_delimiter(self._objects, below or None)["common_prefixes"]
            return sorted(path.rsplit("/", 1)[-1] for path in found)

        return self._try("list", prefix, collect)

    def delete(self, keys: Iterable[str]) -> None:
        import obstore

        named = [*keys]
        waiting = [self._key(key) for key in named]

        def delete() -> None:
            try:
                obstore.delete(self._objects, waiting)
            except FileNotFoundError as error:
                _raise_if_no_bucket(error)
                # A store that minds, and may have stopped at it: one by one, then.
                for key in waiting:
                    try:
                        obstore.delete(self._objects, [key])
                    except FileNotFoundError:
                        pass

        if waiting:
            self._try("delete", _some(named), delete)

    def clear(self, prefix: str) -> None:
        self.delete(record.path for record in self.list(prefix))

    # ------------------------------------------------------------------ files

    def upload(self, source: Path, key: str, owner: str, beside: int = 0) -> FileRecord | None:
        with source.open("rb") as stream:
            size = source.stat().st_size
            if size <= PIECE:
                data = stream.read()
                if not self.create(key, data):
                    return None
                return FileRecord(key, len(data), hashlib.sha256(data).hexdigest())
            # Stores can refuse a second create for one request, not for a file in pieces. So the name is
            # taken first, by a small object that names its owner, who then writes over it.
            if not self.create(key, f"everstep: {owner} is writing this".encode()):
                return self._already_whole(source, key, size)
            limit_s = self._bucket.limits.transfer_s(size)
            deadline = time.monotonic() + limit_s
            return self._try("upload", key, lambda: self._send(stream, key, size, deadline, beside), limit_s)

    def _already_whole(self, source: Path, key: str, size: int) -> FileRecord | None:
        """The record of a file whose name is taken, if that was by its own bytes: ours, before a crash."""
        if self._size(key) != size:
            return None
        mine = FileRecord(key, *digest_of(source))
        return mine if self.digest(key) == mine else None

    def _send(self, stream: BinaryIO, key: str, size: int, deadline: float, beside: int) -> FileRecord:
        import obstore

        stream.seek(0)
        hashing = _HashingReader(stream, deadline)
        piece = max(PIECE, -(-size // MOST_PIECES))
        try:
            obstore.put(
                self._bucket.files,
                self._key(key),
                hashing,
                use_multipart=True,
                chunk_size=piece,
                max_concurrency=_pieces_at_once(piece, beside),
            )
        except FileNotFoundError as error:
            _raise_if_no_bucket(error)
            # The answer to the last piece was lost, and what is done can't be called off. Send it again.
            raise ConnectionResetError(str(error)) from error
        return FileRecord(key, hashing.size, hashing.digest.hexdigest())

    def download(
        self,
        key: str,
        target: Path,
        expected: FileRecord | None = None,
        *,
        durable: bool = False,
        beside: int = 0,
    ) -> FileRecord:
        size = self._size(key)
        if size is None:
            raise DamagedCheckpointError(self.address(), key, "is missing")
        compare(self.address(), expected, FileRecord(key, size, ""))
        with draft_of(target) as draft:
            found = self._receive(key, size, draft.write, beside)
            compare(self.address(), expected, found)
            draft.replace(target, durable=durable)
        return found

    def digest(self, key: str) -> FileRecord | None:
        size = self._size(key)
        return None if size is None else self._receive(key, size, len, 0)

    def _receive(self, key: str, size: int, sink: Callable[[memoryview], object], beside: int) -> FileRecord:
        """Read an object in pieces, a few at a time, and hand them on in order."""
        digest = hashlib.sha256()
        deadline = time.monotonic() + self._bucket.limits.transfer_s(size)
        waiting: deque[Future[memoryview]] = deque()
        window = _pieces_at_once(PIECE, beside)

        def hand_on() -> None:
            data = waiting.popleft().result()
            digest.update(data)
            sink(data)

        with ThreadPoolExecutor(window, thread_name_prefix="everstep-download") as pool:
            try:
                for start in range(0, size, PIECE):
                    waiting.append(pool.submit(self._piece, key, start, min(start + PIECE, size), deadline))
                    if len(waiting) == window:
                        hand_on()
                while waiting:
                    hand_on()
            finally:
                for future in waiting:
                    future.cancel()
        return FileRecord(key, size, digest.hexdigest())

    def _piece(self, key: str, start: int, end: int, deadline: float) -> memoryview:
        import obstore

        def get() -> memoryview:
            try:
                return memoryview(obstore.get_range(self._bucket.files, self._key(key), start=start, end=end))
            except FileNotFoundError:
                raise DamagedCheckpointError(self.address(), key, "was removed while it was read") from None

        return self._try("read", key, get, max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------ one way to ask

    @property
    def _objects(self) -> ObjectStore:
        return self._bucket.objects

    def _key(self, key: str) -> str:
        return "/".join(filter(None, (self._prefix, checked_key(key))))

    def _get(self, key: str) -> bytes | None:
        import obstore

        try:
            return obstore.get(self._objects, self._key(key)).bytes().to_bytes()
        except FileNotFoundError as error:
            _raise_if_no_bucket(error)
            return None

    def _size(self, key: str) -> int | None:
        import obstore

        def head() -> int | None:
            try:
                return obstore.head(self._objects, self._key(key))["size"]
            except FileNotFoundError as error:
                _raise_if_no_bucket(error)
                return None

        return self._try("look at", key, head)

    def _try(self, verb: str, key: str, work: Callable[[], Found], limit_s: float | None = None) -> Found:
        """Do it, again if it fails in a way that may pass, inside one deadline."""
        from obstore import exceptions

        if limit_s is None:
            limit_s = self._bucket.limits.operation_s
        what = f"can't {verb} {self.address(key)}"
        last: Exception | None = None
        tries = 0
        for _ in attempts(limit_s):
            tries += 1
            try:
                return work()
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise self._bucket.refused(what, error) from error
            except (exceptions.BaseError, OSError) as error:
                if any(word in str(error) for word in _LASTING):
                    raise self._bucket.refused(what, error) from error
                if isinstance(error, FileNotFoundError):
                    raise
                logger.debug("%s, attempt %d: %s", what, tries, _first_line(error))
                last = error
        raise StorageError(
            f"{what}: {tries} attempts in {limit_s:.0f} s failed, the last with: {_first_line(last)}",
            "look at the network and at the service's status; a later attempt may succeed",
        ) from last


class _HashingReader(io.RawIOBase):
    """A file that is hashed as it is read, and that stops giving when its time is over."""

    def __init__(self, stream: BinaryIO, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline
        self.size = 0
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        if time.monotonic() > self._deadline:
            raise TimeoutError("the transfer's time is over")
        data = self._stream.read(size)
        self.digest.update(data)
        self.size += len(data)
        return data


def _pieces_at_once(piece: int, beside: int) -> int:
    return max(1, MAX_BUFFERS // (1 + beside) // piece)


def _raise_if_no_bucket(error: FileNotFoundError) -> None:
    """An object that isn't there is an answer; a bucket that isn't is an error."""
    if any(word in str(error) for word in _NO_BUCKET):
        raise error


def _some(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"


def _first_line(error: BaseException | None) -> str:
    """What happened, without the library's own debugging output. Services put the reason into XML."""
    text = str(error).split("\n\nDebug source:")[0]
    return " ".join(text.split())[:500]
