"""The driver's storage code, for tests without an event loop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from everstep.saved.checkpoints import CheckpointRef
from everstep.storage import checkpoints, restore
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.checkpoints import MANIFEST, PARTS, Manifest
from everstep.storage.store import Store


def commit(run: Store, folder: str, epoch: int, index: int, parts: Iterable[bytes]) -> Manifest:
    return complete(checkpoints.commit(ImmediateStore(run), CheckpointRef(folder, epoch, index), parts))


def read_manifest(run: Store, folder: str) -> Manifest | None:
    return complete(checkpoints.read_manifest(ImmediateStore(run), folder))


def list_folders(run: Store) -> list[str]:
    return complete(checkpoints.list_folders(ImmediateStore(run)))


def read_parts(run: Store, folder: str) -> list[bytes]:
    """By rank."""
    return [run.read(file.path) or b"" for file in run.list(f"{folder}/{PARTS}")]


def discard(run: Store, folder: str) -> None:
    """As ``Deletions`` does it."""
    run.delete([f"{folder}/{MANIFEST}"])
    run.clear(folder)


def fetch(checkpoint: Store, cache: Path) -> Path:
    """The folder with its files, which may be evicted from now on."""
    with restore.borrow(checkpoint, cache) as place:
        return place
