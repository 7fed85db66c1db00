"""What is behind the functions that a training function calls (``training``).

One session lives in each worker. It speaks to the driver through a ``Link``: messages up without waiting,
questions with an answer. Nothing here knows which engine or backend there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from everstep.context import TrainContext
from everstep.health.vitals import StackPlace, Stage
from everstep.process.step_times import StepTimes
from everstep.protocol import wire
from everstep.protocol.progress import Progress
from everstep.saved.snapshots import At
from everstep.snapshots.keeper import HostMemory
from everstep.snapshots.reported import GivenSnapshot, ReportedState
from everstep.snapshots.writing import OwnMemory
from everstep.storage.store import open_store
from everstep.worker.datasets import NOWHERE, Datasets
from everstep.worker.reporting import Reporting
from everstep.worker.restoring import Restoring
from everstep.worker.synchronized import SharedValues
from everstep.worker.uploads import Uploads


class Link(Protocol):
    """A worker's way to its driver."""

    def send(self, frame: bytes) -> None:
        """Hand a frame over. Returns once it can't be lost by this process's death."""
        ...

    def ask(self, what: str, body: bytes, timeout_s: float | None) -> bytes:
        """Ask the driver and wait for its answer."""
        ...


class Session:
    """One worker's: what it reports, what it starts from, and what it shares with the other ranks."""

    def __init__(
        self,
        spec: wire.WorkerSpec,
        link: Link,
        memory: HostMemory | None = None,
        progress: Progress | None = None,
    ) -> None:
        """``memory``: of the host, for snapshots that outlive this process."""
        self.spec = spec
        self.progress = progress or Progress()
        self.times = StepTimes()
        self.context = TrainContext(spec)
        self.values = SharedValues(spec.snapshot_every)
        self.datasets = Datasets(spec.member.rank, {}, lambda: NOWHERE)
        self._link = link
        store = open_store(spec.run_folder, spec.storage_options, spec.storage_limits)
        uploads = Uploads(spec, store, link.send)
        self._state = ReportedState(
            spec.epoch,
            spec.member.rank,
            spec.member.world_size,
            memory or OwnMemory(uploads.store_here),
            None if spec.snapshot is None else GivenSnapshot(spec.snapshot, spec.snapshot_ranks, spec.kept),
            lambda: self.datasets.places(),
            lambda mine: self.ask("broadcast", mine, spec.report_wait_s),
            lambda: self.progress.waiting(StackPlace.REPORT),
        )
        self.restoring = Restoring(
            spec, store, self._state, link.ask, lambda: self.reporting.index, self.times, self.progress
        )
        self.reporting = Reporting(
            spec,
            store,
            link.send,
            uploads,
            self._state,
            self.values,
            lambda: self.datasets,
            self.restoring,
            self.times,
            self.progress,
        )

    def begin(self) -> None:
        """The training function starts now."""
        self.restoring.begin()
        self.progress.enter(Stage.FIRST_STEP)

    def hand_over(self, datasets: Mapping[str, Any]) -> None:
        """The data sets that the training function can ask for."""
        self.datasets = Datasets(self.spec.member.rank, datasets, self.restoring.places)

    def ask(self, what: str, body: bytes = b"", timeout_s: float | None = None) -> bytes:
        """The driver, and through it the other ranks."""
        with self.times.waiting(), self.progress.waiting(StackPlace.COLLECTIVE):
            return self._link.ask(what, body, timeout_s)

    # ------------------------------------------------------------------ what the driver says

    def undriven(self, now: bool) -> None:
        self.reporting.uncommitted.undriven(now)
        self._state.keeper.undriven(now)
        if now:
            self.values.abandon()

    def kept(self, kept: Sequence[At], upto: At) -> None:
        """The snapshots ``kept`` are needed; of those up to ``upto``, nothing else is."""
        self._state.keeper.settled(kept, upto)

    def committed(self, index: int) -> None:
        """The driver has committed the checkpoint of this report, or given it up."""
        self.reporting.uncommitted.committed(index)
