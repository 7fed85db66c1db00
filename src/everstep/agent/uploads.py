"""Uploads that a worker did not live to finish: a report that returned is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from everstep.agent import wire


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
