"""Whether a host sees the same storage as the driver: the driver leaves a marker, and every host looks for
it.

Without shared storage, each host would save its part of a checkpoint where the others can't read it. The
marker also shows the last lease under which hosts were used.
"""

from __future__ import annotations

import secrets
import time

from everstep.errors import StorageAccessError
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.layout import is_numbered, key_of
from everstep.storage.schemes import any_bucket
from everstep.storage.store import Store

FOLDER = ".markers"
_PATIENCE_S = 3.0
"""A network file system may be a moment late."""


def leave_marker(store: Store, lease: int) -> str:
    """For the owner of a run, before hosts are asked to look. Those of earlier owners go, and no others: this
    one may have been replaced meanwhile.
    """
    ours = f"{FOLDER}/{key_of(lease)}"
    store.delete(file.path for file in store.list(FOLDER) if file.path < ours)
    marker = f"{ours}-{secrets.token_hex(8)}"
    store.create(marker, b"")
    return marker


async def last_marked(store: AsyncStore) -> int:
    """The last lease that has left a marker, also if the journal has lost it; 0 if none has."""
    names = [file.path.removeprefix(f"{FOLDER}/").partition("-")[0] for file in await store.list(FOLDER)]
    return max(map(int, filter(is_numbered, names)), default=0)


def find_marker(store: Store, marker: str) -> None:
    """Raise ``StorageAccessError`` if the run's storage, seen from here, isn't what the driver sees."""
    deadline = time.monotonic() + _PATIENCE_S
    while not store.exists(marker):
        if time.monotonic() > deadline:
            raise StorageAccessError(
                f"{store.address()} is not the same place here as it is for the driver: {marker}, which the "
                "driver wrote there, is missing",
                "use a storage_path that all hosts share: a network folder mounted at the same path "
                f"everywhere, or a bucket ({any_bucket()})",
            )
        time.sleep(0.1)
