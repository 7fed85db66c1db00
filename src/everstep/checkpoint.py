"""``Checkpoint``: a folder of plain files.

How checkpoints are uploaded, committed and retained lives in ``storage`` and the driver. A ``Checkpoint``
only says where one is and reads it. Local folders are read as they are; what is elsewhere is downloaded, and
compared with its manifest if it has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote, urlsplit

from everstep.errors import (
    ConfigError,
    NotJsonError,
    RefusedAttributeError,
    RefusedError,
    StorageError,
)

if TYPE_CHECKING:
    from everstep.storage.store import Store


class Checkpoint:
    """A folder of files, on this machine or at a URI. Cheap to make, to pickle and to compare: it is only an
    address.

    Nothing is read until ``as_directory`` or ``to_directory`` is called, so one can be put into
    ``train_loop_config``.

    Args:
        path: A folder, or ``s3://bucket/folder``, ``gs://…``, ``az://…``, ``file://…``.
        filesystem: Ray Train's; refused.
        storage_options: Credentials and the like for a URI, as in ``RunConfig``. What isn't there is taken
            from the environment. They go along when the checkpoint is pickled.
    """

    _is_committed = False
    """Whether it must have a manifest: any other folder may be a checkpoint, too."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        filesystem: None = None,
        *,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        if filesystem is not None:
            raise RefusedError(
                f"Checkpoint(filesystem={filesystem!r}) is refused.",
                "Everstep takes no pyarrow filesystems: give a folder or a URI as the path instead.",
                "Checkpoint.filesystem",
            )
        self._path = address_of(path)
        self._options = dict(storage_options or {})

    @property
    def path(self) -> str:
        """The folder, absolute; or the URI."""
        return self._path

    @property
    def filesystem(self) -> NoReturn:
        """Ray Train's; refused."""
        raise RefusedAttributeError(
            "Checkpoint.filesystem is refused.", "Read the files through as_directory() or to_directory()."
        )

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in a folder of this machine."""
        checkpoint = cls(path)
        if not checkpoint._is_local:
            raise ConfigError(
                f"Checkpoint.from_directory({os.fspath(path)!r}) got a URI, expected a folder.",
                f"Write Checkpoint({os.fspath(path)!r}).",
                "Checkpoint.path",
            )
        return checkpoint

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files into a folder, which is made if need be, and give its path.

        What is remote is downloaded once a host, however many of its processes ask for a copy. Without
        ``path`` it is a new temporary folder, which is yours to remove.
        """
        if path is None:
            target = tempfile.mkdtemp(prefix="everstep_checkpoint_")
        else:
            target = os.path.abspath(os.path.expanduser(os.fspath(path)))
        if self._is_local:
            source = self._local_folder()
            real_source, real_target = os.path.realpath(source), os.path.realpath(target)
            if real_source == real_target:
                return target
            if os.path.commonpath([real_source, real_target]) == real_source:
                raise ConfigError(
                    f"Checkpoint.to_directory({target!r}) would copy the checkpoint {source!r} into itself.",
                    "Give a folder outside of it.",
                    "Checkpoint.to_directory.path",
                )
        from pathlib import Path

        from everstep.storage.restore import copy_out

        copy_out(self._store(), Path(target), committed=self._is_committed)
        return target

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """The files in a folder, for as long as the context lasts. Treat it as read-only.

        A local checkpoint is given as it is, without a copy. A remote one is downloaded once a host.
        """
        if self._is_local:
            yield self._local_folder()
            return
        from everstep.storage import restore
        from everstep.storage.checkpoints import manifest_of

        store = self._store()
        if manifest_of(store) is not None:
            with restore.borrow(store, restore.default_cache()) as folder:
                yield str(folder)
            return
        # Not one of Everstep's: nothing says whether it will change, so no copy of it is kept.
        with tempfile.TemporaryDirectory(prefix="everstep_checkpoint_") as temporary:
            yield self.to_directory(temporary)

    def get_metadata(self) -> dict[str, Any]:
        """The dict that was stored with the checkpoint; empty if none was."""
        from everstep.storage.checkpoints import METADATA_FILE

        store = self._store()
        file = store.address(METADATA_FILE)
        text = store.read(METADATA_FILE)
        if text is None:
            return {}
        try:
            metadata = json.loads(text)
        except ValueError as error:
            raise StorageError(
                f"{file} is not JSON: {error}.", "Write it anew with set_metadata(…)."
            ) from error
        if not isinstance(metadata, dict):
            raise StorageError(f"{file} holds no JSON object.", "Write it anew with set_metadata(…).")
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Store a dict with the checkpoint, in place of the one before."""
        from everstep.storage.checkpoints import METADATA_FILE

        try:
            text = json.dumps(dict(metadata))
        except (TypeError, ValueError) as error:
            raise NotJsonError(
                f"Checkpoint.set_metadata got something that isn't JSON: {error}.",
                "Use dicts with string keys, lists, strings, numbers, booleans and None.",
                "Checkpoint.set_metadata.metadata",
            ) from error
        self._store().replace(METADATA_FILE, text.encode())

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Store a dict with the checkpoint, over the one before, key by key."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def __eq__(self, other: object) -> bool:
        return self._path == other._path if isinstance(other, Checkpoint) else NotImplemented

    def __hash__(self) -> int:
        return hash((Checkpoint, self._path))

    def __repr__(self) -> str:
        return f"Checkpoint(path={self._path!r})"

    def __fspath__(self) -> str:
        raise TypeError(
            "A Checkpoint isn't a path. Use `with checkpoint.as_directory() as folder:`, "
            "or checkpoint.to_directory()."
        )

    @property
    def _is_local(self) -> bool:
        return "://" not in self._path

    def _local_folder(self) -> str:
        if not os.path.isdir(self._path):
            raise StorageError(
                f"There is no checkpoint folder {self._path!r} on this host.",
                "Check the path; if it is a temporary folder, report it before it is removed.",
            )
        return self._path

    def _store(self) -> Store:
        from everstep.storage.store import open_store  # here: a config needs no third-party package

        return open_store(self._local_folder() if self._is_local else self._path, self._options)


class CheckpointUploadMode(Enum):
    """When a checkpoint is uploaded: before ``report`` returns, after it, or not by Everstep."""

    ASYNC = "ASYNC"
    """In the background. The files are pinned before ``report`` returns, and survive the worker's death."""
    SYNC = "SYNC"
    """Before ``report`` returns."""
    NO_UPLOAD = "NO_UPLOAD"
    """Not at all: the checkpoint is in shared storage already, and the report only says where."""

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Whether the local folder is removed where ``report`` gets no argument for it."""
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(Enum):
    """What ``get_all_reported_checkpoints`` waits for. Without validations, both wait for the commit."""

    COMMITTED = "COMMITTED"
    """Wait for the commit."""
    VALIDATED = "VALIDATED"
    """Wait for the commit, and until no validation is to come."""


class ReportedCheckpointStatus(Enum):
    """Where a reported checkpoint stands."""

    COMMITTED = "COMMITTED"
    """It exists, is whole, and nobody has asked for a validation."""
    PENDING_VALIDATION = "PENDING_VALIDATION"
    """It exists, and its validation is to come. Until then it is kept."""
    VALIDATED = "VALIDATED"
    """Its metrics have what the validation has found."""
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    """The validation took longer than ``ValidationTaskConfig.timeout_s``."""
    VALIDATION_FAILED = "VALIDATION_FAILED"
    """The validation raised something, or its process died three times."""


@dataclass(frozen=True)
class ReportedCheckpoint:
    """A committed checkpoint, and what is known of it."""

    checkpoint: Checkpoint
    """The checkpoint itself."""
    metrics: dict[str, Any]
    """What rank 0 reported with it, and what its validation has found."""
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED
    """Whether it is validated."""


def address_of(path: str | os.PathLike[str]) -> str:
    """An absolute folder, or a URI without a slash at its end."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(
            f"path is {path!r}, expected a folder or a URI.", "Write '/data/checkpoint', for example.", "path"
        )
    text = os.fspath(path)
    if "://" not in text:
        return os.path.abspath(os.path.expanduser(text))
    parts = urlsplit(text)
    if parts.scheme == "file":
        return os.path.abspath(unquote(parts.path))
    return text.rstrip("/")
