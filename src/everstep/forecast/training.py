"""Training between two interruptions, in closed form: how much of the time were steps, and what was saved.

Nothing is simulated here: a stretch of weeks costs as little as one of seconds.
"""

from __future__ import annotations

import msgspec

from everstep.forecast.pieces import PiecewiseLedger
from everstep.goodput import Category


class Cadence(msgspec.Struct, frozen=True):
    """How long a step takes, and how often a checkpoint and a snapshot are made."""

    step_s: float
    every_s: float
    """Of training between two checkpoints, snapshots included."""
    cost_s: float
    """How long training pauses for one."""
    snapshot_every_s: float = 0.0
    """Of training between two snapshots in memory; 0: none are taken."""
    snapshot_cost_s: float = 0.0
    copies: int | None = 1
    """How many other hosts have a copy of each host's part; None: each has the whole."""

    @property
    def cycle_s(self) -> float:
        return self.every_s + self.cost_s

    @property
    def snapshot_cycle_s(self) -> float:
        return self.snapshot_every_s + self.snapshot_cost_s if self.snapshot_every_s else 0.0

    @property
    def paused(self) -> float:
        """The share of training, without checkpoints, that goes into snapshots."""
        return self.snapshot_cost_s / self.snapshot_cycle_s if self.snapshot_every_s else 0.0


class Stopped(msgspec.Struct, frozen=True):
    """How a stretch ended."""

    cadence: Cadence
    hosts: int
    saved: float
    """The time of the newest checkpoint."""
    safe: float
    """And that of what is still known, in memory or there."""
    lost_s: float = 0.0
    """Seconds of steps after that."""

    @property
    def in_memory(self) -> bool:
        return self.cadence.snapshot_every_s > 0

    def lose_snapshot(self, ledger: PiecewiseLedger) -> float:
        """Steps that only memory held must be done again. Returns how many seconds of them."""
        share = 1.0 - self.cadence.paused
        again = {Category.STEP: -share, Category.REDO: share}
        ledger.charge_mixed(again, self.hosts, self.saved, self.safe)
        return self.safe - self.saved


class Stretch:
    """Training without an interruption. Time is counted in cycles: steps, then a checkpoint."""

    def __init__(self, cadence: Cadence, began: float, hosts: int) -> None:
        self.cadence = cadence
        self.began = began
        self.hosts = hosts
        self.kept = began
        """The time of the newest committed checkpoint: steps until then can't be lost."""
        self.saved = 0
        """Checkpoints so far."""
        self.unreported = False
        """The controller doesn't know of the newest."""

    def next_checkpoint(self) -> float:
        """When the next one is committed, if nothing comes between."""
        return self.kept + self.cadence.cycle_s

    def catch_up(self, now: float, ledger: PiecewiseLedger) -> None:
        """Account for the checkpoints that were committed until now."""
        if not self.cadence.cycle_s > 0:
            return
        cycles = int((now - self.kept + 1e-9) / self.cadence.cycle_s)
        if cycles <= 0:
            return
        end = self.kept + cycles * self.cadence.cycle_s
        # One charge for all of them: the share of stalls is the same all over the stretch.
        stalls = self.cadence.cost_s + self.cadence.every_s * self.cadence.paused
        self._charge_mixed(ledger, Category.STEP, self.kept, end, stalls / self.cadence.cycle_s)
        self.kept = end
        self.saved += cycles
        self.unreported = True

    def save_now(self, now: float, ledger: PiecewiseLedger) -> float:
        """Make a checkpoint out of turn, after the present step. Returns when it is committed."""
        self.catch_up(now, ledger)
        stepped = min(now + self.cadence.step_s, self.kept + self.cadence.every_s)
        return max(now, stepped) + self.cadence.cost_s

    def change_cadence(self, cadence: Cadence, now: float, ledger: PiecewiseLedger) -> None:
        """Checkpoints come at another pace from now on."""
        self.catch_up(now, ledger)
        self.cadence = cadence

    def saved_until(self, now: float, ledger: PiecewiseLedger) -> None:
        """The checkpoint that was made out of turn is committed now."""
        saves = now - self.cadence.cost_s
        self._charge_mixed(ledger, Category.STEP, self.kept, saves, self.cadence.paused)
        ledger.charge(Category.CHECKPOINT, self.hosts, max(self.kept, now - self.cadence.cost_s), now)
        self.kept = now
        self.saved += 1
        self.unreported = True

    def cut_off(self, now: float, ledger: PiecewiseLedger, kept: bool, host_lost: bool = False) -> Stopped:
        """It ends here. Lost are the steps since the last checkpoint or snapshot, or none if they are
        ``kept``. Where a host was lost, not all copies of its newest snapshot were made yet.
        """
        self.catch_up(now, ledger)
        stepped = min(now, self.kept + self.cadence.every_s)
        safe = stepped if kept else self._safe(stepped, host_lost and self.cadence.copies is not None)
        self._charge_mixed(ledger, Category.STEP, self.kept, safe, self.cadence.paused)
        self._charge_mixed(ledger, Category.REDO, safe, stepped, self.cadence.paused)
        ledger.charge(Category.CHECKPOINT, self.hosts, stepped, now)
        return Stopped(self.cadence, self.hosts, self.kept, safe, max(0.0, stepped - safe))

    def _safe(self, stepped: float, uncopied: bool) -> float:
        cycle = self.cadence.snapshot_cycle_s
        snapshots = int((stepped - self.kept + 1e-9) / cycle) if cycle else 0
        return self.kept + max(0, snapshots - uncopied) * cycle

    def _charge_mixed(
        self, ledger: PiecewiseLedger, category: Category, since: float, until: float, stalls: float
    ) -> None:
        shares = {Category.CHECKPOINT: stalls, category: 1.0 - stalls} if stalls else {category: 1.0}
        ledger.charge_mixed(shares, self.hosts, since, until)
