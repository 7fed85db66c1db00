"""What the user asked for, as the controller needs it."""

from __future__ import annotations

import msgspec

from everstep.deadlines import Deadlines
from everstep.health.hangs import OnHang


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    workers_min: int
    workers_max: int
    group_size: int | None = None
    """Workers in a replica group; None: replicas are not independent, and all restart together."""
    groups_min: int = 1
    """Replica groups that must train for others to be waited for; with fewer, everything restarts."""
    max_failures: int = 0
    controller_failure_limit: int = -1
    max_preemption_failures: int = -1
    max_replica_failures: int | None = None
    """For replacements of replica groups; None: they spend ``max_failures``."""
    on_hang: OnHang = OnHang.RESTART
    spread: bool = False
    resize_interval_s: float = 60.0
    migrate_margin_s: float = 10.0
    """How long before a preemption's deadline the workers leave; at most a quarter of the notice."""
    group_attempts: int = 3
    """Failed starts of a replacement before everything restarts instead."""
    snapshot_copies: int = 0
    """On how many other hosts snapshots are kept."""
    deadlines: Deadlines = Deadlines()

    @property
    def start_min(self) -> int:
        """Workers without whose place none is started."""
        return max(self.workers_min, self.groups_min * (self.group_size or 0))
