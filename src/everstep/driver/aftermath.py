"""After a break in which nobody drove and no worker was left: what is in storage is put in order.

A checkpoint that is whole by its parts is committed, the newest must be restorable, and what nobody can
finish any more goes. For the owner of the run, before workers start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from everstep.driver import journal
from everstep.driver.history import History
from everstep.errors import DamagedCheckpointError
from everstep.storage import checkpoints, restore
from everstep.storage.checkpoints import Manifest, PartRecord
from everstep.storage.store import Store

_NO_METRICS = msgspec.Raw(msgspec.msgpack.encode({}))


def put_in_order(
    run: Store, history: History, write: Callable[[journal.AnyRecord], None], say: Callable[[str], None]
) -> None:
    """``write`` puts a record into the journal, and into ``history``."""
    for folder, part, manifest in _commit_what_is_whole(run, history):
        say(f"checkpoint {folder} is whole, and is committed now")
        write(_committed(folder, part, manifest))
    _drop_damaged(run, history, write, say)
    for folder in checkpoints.garbage(run, {*history.checkpoints, *history.damaged}):
        checkpoints.discard(run, folder)


def damaged(folder: str, reason: str) -> journal.Damaged:
    return journal.Damaged(time.monotonic(), folder, reason)


def _commit_what_is_whole(run: Store, history: History) -> list[tuple[str, PartRecord, Manifest]]:
    """Nobody can tell any more what the ranks reported; the parts that they saved still can."""
    found = []
    for folder in set(checkpoints.list_folders(run)) - {*history.checkpoints, *history.damaged}:
        with suppress(DamagedCheckpointError):
            parts = checkpoints.whole_by_parts(run, folder)
            # Older ones were given up, or are being deleted.
            if parts and _is_newer(parts[0], history):
                encoded = [msgspec.json.encode(part) for part in parts]
                manifest = checkpoints.commit(run, folder, parts[0].epoch, parts[0].index, encoded)
                found.append((folder, parts[0], manifest))
    return sorted(found, key=lambda entry: entry[1].checkpoint)


def _is_newer(part: PartRecord, history: History) -> bool:
    newest = history.newest
    return newest is None or (part.epoch, part.index) > (newest.ref.epoch, newest.ref.index)


def _committed(folder: str, part: PartRecord, manifest: Manifest) -> journal.Committed:
    return journal.Committed(
        time.monotonic(),
        folder,
        part.epoch,
        part.index,
        msgspec.Raw(part.metrics) if part.metrics else _NO_METRICS,
        manifest.external,
        part.group,
        part.generation,
    )


def _drop_damaged(
    run: Store, history: History, write: Callable[[journal.AnyRecord], None], say: Callable[[str], None]
) -> None:
    """The newest checkpoint must be whole, or the one before it, …"""
    while (newest := history.newest) is not None and newest.external is None:
        try:
            restore.verify(run.child(newest.ref.folder))
        except DamagedCheckpointError as error:
            say(f"{error}; the one before it is used")
            write(damaged(newest.ref.folder, str(error)))
        else:
            return
