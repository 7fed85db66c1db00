"""Everything that workers can be started from: checkpoints in storage, snapshots in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from everstep.identity import Incarnation
from everstep.saved.checkpoints import Checkpoints
from everstep.saved.snapshots import At, Snapshots
from everstep.topology.slices import HostId, SliceName


class RestorePoints:
    def __init__(self, copies: int = 0) -> None:
        """``copies``: on how many other hosts snapshots are kept."""
        self.checkpoints = Checkpoints()
        self.snapshots = Snapshots(copies)
        self.trains_since = 0.0
        """When all workers last began to train, from what they had restored."""

    def in_memory(self, members: Mapping[int, HostId], slices: Mapping[HostId, SliceName]) -> At | None:
        """What these ranks, which start now, restore from memory: nothing, if storage has a newer state."""
        kept = self.snapshots.begin(members, slices)
        if kept is not None and self.checkpoints.holds_newer(kept):
            self.snapshots.forget_all()
            return None
        return kept

    def describe(self, snapshot: At | None) -> tuple[str, float | None]:
        """(what is restored, when it was reported): this snapshot, or else the newest checkpoint."""
        newest = self.checkpoints.newest
        if snapshot is not None:
            where = "memory of other hosts" if self.snapshots.sources(snapshot) else "memory"
            return f"{where}, report {snapshot.report}", self.snapshots.since
        if newest is not None:
            return f"storage, {newest.folder}", self.checkpoints.since(newest)
        return "", None

    def steps_lost(self, epoch: int, furthest: int, snapshot: At | None) -> int:
        """How many of an epoch's reports a start from this snapshot, or else from storage, does again."""
        lost = self.checkpoints.lost_since(epoch, furthest)
        if snapshot is None or snapshot.epoch != epoch:
            return lost
        return min(lost, max(0, furthest - snapshot.report))

    def worth_waiting_s(self, uploading: Iterable[tuple[Incarnation, int]]) -> float:
        """How long uploads are worth waiting for: as long as it takes to train again what is in them and in
        nothing else. Without anything else to restore, any wait is worth it.
        """
        newest, snapshots = self.checkpoints.newest, self.snapshots
        if newest is None and snapshots.kept is None:
            return math.inf
        reported = [self.checkpoints.reported_at(*report) or 0.0 for report in uploading]
        saved = self.checkpoints.since(newest) if newest is not None else None
        otherwise = max(self.trains_since, saved or 0.0, snapshots.since or 0.0)
        return max(0.0, max(reported, default=0.0) - otherwise)
