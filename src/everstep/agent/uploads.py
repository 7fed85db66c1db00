"""What an agent uploads for its workers: snapshots, and what a worker did not live to finish."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from everstep import kernel
from everstep.protocol import framing, wire
from everstep.snapshots.segments import Slot

if TYPE_CHECKING:
    from everstep.storage.checkpoints import Share

_NICENESS = 10
"""Training comes first."""


def write_snapshot(spec: wire.WorkerSpec, slot: Slot, share: Share, held: bool) -> wire.Uploaded:
    """Write a worker's snapshot to storage. Takes as long as the storage does; on a thread of its own."""
    import msgspec

    from everstep.snapshots.writing import write
    from everstep.storage.store import open_store

    if kernel.HAS_DEATH_SIGNALS:  # Linux, where this concerns the thread alone, and those that it starts
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    who = (spec.epoch, spec.generation, spec.member.rank, share.index)
    try:
        run = open_store(spec.run_folder, spec.storage_options, spec.storage_limits)
        part = write(run, share, slot, with_shared=spec.member.group_rank == 0)
    except Exception as error:  # whatever it is: somebody waits for the word that this is over
        return wire.Uploaded(*who, None, framing.described(error))
    return wire.Uploaded(*who, msgspec.structs.replace(part, held=held))


def finish_uploads(spec: wire.WorkerSpec) -> Iterator[wire.Uploaded]:
    """Upload what lies in the spool of a worker that is gone. Takes as long as the storage does."""
    from everstep.errors import StorageError
    from everstep.storage import snapshots
    from everstep.storage.store import open_store

    who = (spec.epoch, spec.generation, spec.member.rank)
    for job in snapshots.pending(Path(spec.spool)):
        index = snapshots.read(job).share.index
        try:
            run = open_store(spec.run_folder, spec.storage_options, spec.storage_limits)
            part = snapshots.finish(job, run)
            word = wire.Uploaded(*who, index, part)
        except (StorageError, OSError) as error:
            word = wire.Uploaded(*who, index, None, f"{type(error).__name__}: {error}")
        snapshots.forget(job)
        yield word
