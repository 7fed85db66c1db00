"""How long training stood still for checkpoints, from the reports of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from everstep.identity import Incarnation
from everstep.journal import records
from everstep.journal.ledger import RunLedger

_WORTH_S = 0.25
"""Seconds of stall that are recorded at once."""
_LATEST_S = 10.0
"""Less than that is recorded after this time."""
_REPORTS = 64
"""For how many of the newest reports the longest stall is kept."""


class _Group:
    """One incarnation of a replica group."""

    def __init__(self, upto: int) -> None:
        self.recorded = upto
        """Stalls of these reports are in the journal."""
        self.newest = upto
        self.longest: dict[int, float] = {}
        """Of all ranks, by report."""
        self.seconds = 0.0
        """That are not in the journal."""
        self.since = 0.0
        self.at = 0.0


class Stalls:
    """Ranks save at the same time, so that their stalls overlap: of each report, the longest counts."""

    def __init__(self, write: Callable[[records.AnyRecord], None], ledger: RunLedger) -> None:
        self._write = write
        self._ledger = ledger
        self._groups: dict[Incarnation, _Group] = {}

    def add(
        self, of: Incarnation, index: int, seconds: float, now: float, others: Sequence[int] = ()
    ) -> None:
        """A rank stood still for its report ``index``, while the others came as far as this."""
        group = self._groups.get(of)
        if group is None:
            group = self._groups[of] = _Group(self._ledger.stalls_upto.get(of, 0))
        if index <= group.recorded:
            return  # an earlier driver has recorded it
        if max(others, default=0) > index + 1:
            seconds /= 1 + len(others)  # they don't wait for it
        before = group.longest.get(index, 0.0)
        if seconds <= before:
            return
        group.longest[index] = seconds
        if len(group.longest) > _REPORTS:
            del group.longest[min(group.longest)]
        if not group.seconds:
            group.since = now
        group.seconds += seconds - before
        group.newest, group.at = max(index, group.newest), now

    def flush(self, now: float, *, all_: bool = False) -> None:
        """Record what is worth it."""
        for of, group in self._groups.items():
            due = all_ or group.seconds >= _WORTH_S or now - group.since >= _LATEST_S
            if group.seconds and due:
                self._write(records.Stalled(group.at, *of, group.newest, group.seconds))
                group.seconds = 0.0

    def restart(self, epoch: int, now: float) -> None:
        """Workers start: what the last ones said is all that there will be of theirs."""
        self.flush(now, all_=True)
        self._groups = {of: group for of, group in self._groups.items() if of.epoch == epoch}
