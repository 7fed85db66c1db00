"""The checkpoint that a worker was given to go on from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everstep.checkpoint import Checkpoint
from everstep.health.vitals import Stage
from everstep.process.current import session_here
from everstep.storage import restore


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


@contextmanager
def _restoring() -> Iterator[None]:
    session = session_here()
    if session is None:
        yield
        return
    try:
        with session.progress.during(Stage.RESTORE):
            yield
    finally:
        session.restoring.restored()
