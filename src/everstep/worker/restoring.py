"""What a worker starts from, and which checkpoints its run has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.checkpoint import Checkpoint, ReportedCheckpoint, ReportedCheckpointStatus
from everstep.errors import CallError, UnequalReportsError
from everstep.health.vitals import StackPlace, Stage
from everstep.process.step_times import StepTimes
from everstep.protocol import wire, worker_messages
from everstep.protocol.progress import Progress
from everstep.snapshots.content import Folder, Restorable
from everstep.snapshots.layout import holds_state, index_file, places_in, rank_of_index
from everstep.snapshots.reported import ReportedState
from everstep.storage import checkpoints, restore
from everstep.storage.store import Store
from everstep.worker.datasets import NOWHERE, agreed_places, is_place_file
from everstep.worker.restored import RestoredCheckpoint


class Restoring:
    def __init__(
        self,
        spec: wire.WorkerSpec,
        store: Store,
        state: ReportedState,
        ask: Callable[[str, bytes, float | None], bytes],
        reports: Callable[[], int],
        times: StepTimes,
        progress: Progress,
    ) -> None:
        """``ask``: the driver. ``reports``: how many this worker has made."""
        self._spec = spec
        self._store = store
        self._state = state
        self._ask = ask
        self._reports = reports
        self._times = times
        self._progress = progress
        self._from: Checkpoint | None = None
        """Whose state was loaded."""
        self._began = time.monotonic()
        self._seconds = 0.0

    def begin(self) -> None:
        """The training function starts now."""
        self._began = time.monotonic()

    def take_seconds(self) -> float:
        """How long it took until what this worker starts from had been read; 0 from the second call on."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def places(self) -> Mapping[str, Any]:
        """Of data sets, in the checkpoint that this worker starts from."""
        remembered = self._state.restored_places()
        if remembered is not None:
            return agreed_places(
                {index_file(rank): json.dumps({"places": places}).encode() for rank, places in remembered}
            )
        if self._from is not None:
            checkpoint = self._from._store()
        elif self._spec.checkpoint is not None:
            checkpoint = self._store.child(self._spec.checkpoint)
        else:
            return NOWHERE
        found = restore.read(
            checkpoint,
            lambda path: is_place_file(path) or rank_of_index(path) is not None,
            self._spec.storage_options,
        )
        return agreed_places(
            {path: data if is_place_file(path) else places_in(data) for path, data in found.items()}
        )

    def checkpoint(self) -> Checkpoint | None:
        """What this worker was given to start from, until it has reported something itself."""
        if self._reports():
            return self._newest()
        if self._spec.checkpoint is None:
            return None
        options = self._spec.storage_options
        manifest = checkpoints.manifest_of(self._store.child(self._spec.checkpoint))
        if manifest is not None and manifest.external:
            return Checkpoint(manifest.external, storage_options=options)
        return RestoredCheckpoint(self._store.address(self._spec.checkpoint), storage_options=options)

    def _newest(self) -> Checkpoint | None:
        limit_s = self._spec.report_wait_s
        try:
            found = self._list("newest", self._reports(), limit_s)
        except TimeoutError:
            raise UnequalReportsError(
                f"get_checkpoint() at rank {self._spec.member.rank} has waited for report {self._reports()} "
                f"of other ranks for {limit_s:g} s (Deadlines.report_wait_s)"
            ) from None
        options = self._spec.storage_options
        for one in found:
            kind = Checkpoint if one.external else RestoredCheckpoint
            return kind(one.address, storage_options=options)
        return None

    def restore(self, state: Restorable) -> int:
        """Load the newest state that there is. Returns its step."""
        if self._reports():
            raise CallError(
                "State.restore() was called after report()",
                "call it once, before the first step, so that nothing that was trained is written over",
            )
        try:
            step = self._state.restore(state)
            if step is not None:
                return step
            for checkpoint in self._with_state():
                with checkpoint.as_directory() as folder:
                    saved = Folder(Path(folder))
                    state.load(saved, self._spec.member.rank)
                    self._from = checkpoint
                    return saved.index(saved.ranks[0]).step
            return 0
        finally:
            self.restored()

    def _with_state(self) -> Iterator[Checkpoint]:
        """Checkpoints that hold a state, from the newest down. The newest may be one that the training
        function has made itself.
        """
        newest = self.checkpoint()
        if newest is None:
            return
        if _has_state(newest):
            yield newest
        else:
            for one in reversed(self._list("checkpoints", 0, None)):
                checkpoint = RestoredCheckpoint(one.address, storage_options=self._spec.storage_options)
                if not one.external and _has_state(checkpoint):
                    yield checkpoint

    def reported(self, validated: bool, timeout_s: float | None) -> list[ReportedCheckpoint]:
        """``validated``: once no validation is to come either."""
        try:
            limit_s = None if timeout_s is None else max(0.0, timeout_s)
            if validated and self._spec.validates:
                with self._times.waiting(), self._progress.during(Stage.PAUSE, "validation"):
                    found = self._answers("validated", self._reports(), limit_s)
            else:
                found = self._list("checkpoints", self._reports(), limit_s)
        except TimeoutError:
            found = self._list("checkpoints", 0, None)  # as it is now
        options = self._spec.storage_options
        return [
            ReportedCheckpoint(
                Checkpoint(one.address, storage_options=options),
                one.metrics,
                ReportedCheckpointStatus(one.status),
            )
            for one in found
        ]

    def _list(self, what: str, upto: int, timeout_s: float | None) -> list[worker_messages.Listed]:
        with (
            self._times.waiting(),
            self._progress.during(Stage.CHECKPOINT),
        ):  # the driver may be committing it
            return self._answers(what, upto, timeout_s)

    def _answers(self, what: str, upto: int, timeout_s: float | None) -> list[worker_messages.Listed]:
        with self._progress.waiting(StackPlace.REPORT):
            return worker_messages.listing.decode(self._ask(what, msgspec.msgpack.encode(upto), timeout_s))

    def restored(self) -> None:
        """What this worker starts from has been read."""
        if not self._reports():
            self._seconds = time.monotonic() - self._began


def _has_state(checkpoint: Checkpoint) -> bool:
    manifest = checkpoints.manifest_of(checkpoint._store())
    return manifest is not None and holds_state(file.path for file in manifest.files)
