"""How a simulated worker's share of a checkpoint gets into the simulated store."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from everstep.errors import StorageError
from everstep.protocol import worker_messages
from everstep.saved.reports import Part
from everstep.snapshots.layout import index_file
from everstep.storage import checkpoints
from everstep.storage.store import FileRecord
from everstep.validation import BY_DEFAULT

if TYPE_CHECKING:
    from everstep.sim.workers import SimWorker


class Saving:
    """One rank's share of a checkpoint, on its way to storage."""

    def __init__(self, worker: SimWorker, index: int, step: int, held: bool) -> None:
        spec = worker.spec
        grouped = worker.cluster.scenario.settings.group_size is not None
        group = spec.assignment.group_id if grouped else None
        self.folder = checkpoints.folder_name(spec.epoch, index, group, spec.generation)
        self._worker = worker
        self._index = index
        self._data = str(step).encode()
        self._held = held

    def upload(self, report: worker_messages.Report) -> None:
        """The files, then the part, then the report: a worker may die in between."""
        try:
            self._create_file()
        except StorageError as error:
            self._worker.saved(report, None, str(error))
            return
        self._worker.later(self._worker.cluster.rng.uniform(0.0, 0.3), partial(self._bring, report))

    def _bring(self, report: worker_messages.Report) -> None:
        try:
            part = self._create_part()
        except StorageError as error:
            self._worker.saved(report, None, str(error))
        else:
            self._worker.saved(report, part, "")

    def upload_behind(self) -> None:
        """While training goes on. If the worker is dead, its agent does it."""
        worker, agent = self._worker, self._worker.agent
        if not agent.alive or not agent.knows(worker):
            return
        if agent.frozen:
            agent.held_back.append(self.upload_behind)
            return
        part, why_not = None, ""
        try:
            self._create_file()
            part = self._create_part()
        except StorageError as error:
            why_not = str(error)
        if worker.is_dead:
            agent.uploaded(worker, self._index, part, why_not)
        elif part is not None:
            worker.send(worker_messages.PartDone(part))
        else:
            worker.send(worker_messages.PartFailed(self._index, why_not))

    def _file(self) -> str:
        rank = self._worker.rank
        return index_file(rank) if self._worker.cluster.scenario.snapshots else f"shard-{rank}"

    def _create_file(self) -> None:
        cluster = self._worker.cluster
        if cluster.chance(cluster.scenario.failed_upload):
            raise StorageError("the upload stalled")
        cluster.run.create(f"{self.folder}/{self._file()}", self._data)

    def _create_part(self) -> Part:
        worker = self._worker
        spec = worker.spec
        leads = spec.assignment.group_rank == 0
        share = checkpoints.Share(
            self.folder,
            worker.rank,
            spec.epoch,
            self._index,
            spec.assignment.group_id,
            spec.generation,
            spec.member.group_size,
            worker.metrics(self._index) if leads else b"",
            BY_DEFAULT if leads and spec.validates and self._index % 3 == 0 else b"",
        )
        digest = hashlib.sha256(self._data).hexdigest()
        file = FileRecord(self._file(), len(self._data), digest)
        part = checkpoints.record_part(worker.cluster.run, share, [file])
        return msgspec.structs.replace(part, held=self._held)
