"""Training between two interruptions, in closed form: how much of the time were steps, and what was saved.

Nothing is simulated here: a stretch of weeks costs as little as one of seconds.
"""

from __future__ import annotations

import msgspec

from everstep.forecast.pieces import PiecewiseLedger
from everstep.goodput import Category


class Cadence(msgspec.Struct, frozen=True):
    """How long a step takes, and how often a checkpoint is made."""

    step_s: float
    every_s: float
    """Of training between two checkpoints."""
    cost_s: float
    """How long training pauses for one."""

    @property
    def cycle_s(self) -> float:
        return self.every_s + self.cost_s


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
        self._charge_mixed(ledger, self.kept, end, self.cadence.cost_s / self.cadence.cycle_s)
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
        ledger.charge(Category.STEP, self.hosts, self.kept, now - self.cadence.cost_s)
        ledger.charge(Category.CHECKPOINT, self.hosts, max(self.kept, now - self.cadence.cost_s), now)
        self.kept = now
        self.saved += 1
        self.unreported = True

    def cut_off(self, now: float, ledger: PiecewiseLedger, kept: bool) -> float:
        """It ends here. Returns the seconds of steps that are lost: those since the last checkpoint, or none
        if they are ``kept``.
        """
        self.catch_up(now, ledger)
        stepped = min(now, self.kept + self.cadence.every_s)
        ledger.charge(Category.STEP if kept else Category.REDO, self.hosts, self.kept, stepped)
        ledger.charge(Category.CHECKPOINT, self.hosts, stepped, now)
        return 0.0 if kept else max(0.0, stepped - self.kept)

    def _charge_mixed(self, ledger: PiecewiseLedger, since: float, until: float, stalls: float) -> None:
        ledger.charge_mixed(
            {Category.CHECKPOINT: stalls, Category.STEP: 1.0 - stalls}, self.hosts, since, until
        )
