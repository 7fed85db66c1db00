"""What an agent uploads for its workers: snapshots, and what a worker did not live to finish."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.agent.drivers import Holder
from everstep.agent.memory import Memory
from everstep.agent.worker_process import WorkerProcess
from everstep.process import kernel
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
    except Exception as error:  # whatever it is: the driver waits for the result
        return wire.Uploaded(*who, None, framing.described(error))
    return wire.Uploaded(*who, msgspec.structs.replace(part, held=held))


def finish_uploads(spec: wire.WorkerSpec) -> Iterator[wire.Uploaded]:
    """Upload what lies in the spool of a worker that is gone. Takes as long as the storage does."""
    from everstep.errors import StorageError
    from everstep.storage import pending_uploads
    from everstep.storage.store import open_store

    who = (spec.epoch, spec.generation, spec.member.rank)
    for job in pending_uploads.pending(Path(spec.spool)):
        index = pending_uploads.read(job).share.index
        try:
            run = open_store(spec.run_folder, spec.storage_options, spec.storage_limits)
            part = pending_uploads.finish(job, run)
            message = wire.Uploaded(*who, index, part)
        except (StorageError, OSError) as error:
            message = wire.Uploaded(*who, index, None, f"{type(error).__name__}: {error}")
        pending_uploads.forget(job)
        yield message


class HostUploads:
    """Each on a thread of its own; its result is sent from the agent's thread. ``known``: workers of a rank
    that live, or whose end a later driver must learn of.
    """

    def __init__(
        self, holder: Holder, memory: Memory, known: Callable[[int], Iterable[WorkerProcess]]
    ) -> None:
        self._holder = holder
        self._memory = memory
        self._known = known
        self._loop = asyncio.get_running_loop()

    def store(self, spec: wire.WorkerSpec, number: int, share: Share, held: bool) -> None:
        """Write a snapshot of this worker to storage, beside all else."""
        slot = self._memory.read(spec.member.rank, number)
        assert slot is not None, "a worker stores slots that it has"

        def write() -> None:
            message = write_snapshot(spec, slot, share, held)
            self._loop.call_soon_threadsafe(self._stored, spec, number, slot, message)

        threading.Thread(target=write, name="everstep-store", daemon=True).start()

    def _stored(self, spec: wire.WorkerSpec, number: int, slot: Slot, message: wire.Uploaded) -> None:
        rank = spec.member.rank
        self._memory.release(slot)
        asked: WorkerProcess | None = None
        for worker in self._known(rank):
            if worker.exited is None:  # the one that asked, or the one that has its place now
                worker.memory.stored(number)
            if (worker.spec.epoch, worker.spec.generation) == (spec.epoch, spec.generation):
                asked = worker
        if asked is not None:
            self._done(asked, message)

    def clear_away(self, worker: WorkerProcess, remove: Callable[[], None]) -> None:
        """What it was uploading is uploaded by us, beside all else; then its temporary files go."""

        def clear() -> None:
            for message in finish_uploads(worker.spec) if Path(worker.spec.spool).is_dir() else ():
                self._loop.call_soon_threadsafe(self._done, worker, message)
            remove()

        threading.Thread(target=clear, daemon=True).start()

    def _done(self, worker: WorkerProcess, message: wire.Uploaded) -> None:
        worker.uploaded.append(message)
        self._holder.send(message)
