"""When the state that workers report is due: to be written to storage, and to be taken into memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from everstep.config import MemoryConfig
from everstep.protocol import worker_messages

MAX_STALL = 0.02
"""The share of its time that training may wait for snapshots, unless the user says how often to take them."""
_REPORTS = 32
"""How many of the last reports the speed of training is measured by."""
_MARGIN = 1.25
"""A snapshot that is taken while training goes on is whole after some time. The next one comes after this
many times as long: a rank that reaches it earlier has to wait.
"""
_CLOSE = 0.25
"""The cadence changes only if it differs by more than this share: a change holds all ranks up for
a moment.
"""


class StatesDue:
    """Every so often, all ranks write at the same report."""

    def __init__(self, every_s: float, propose: Callable[[worker_messages.AnyValue], None]) -> None:
        self._every_s = every_s
        self._propose = propose
        self._asked: float | None = None
        """When it was last proposed."""
        self._saved: float | None = None
        """When that was of which it is known that all ranks have written."""
        self._turn = 0

    def restart(self, now: float) -> None:
        """Workers start. What they were to write before that, and have not, is due again."""
        if self._saved is None:
            self._saved = now
        self._asked = self._saved

    def saved(self) -> None:
        """A checkpoint is committed."""
        self._saved = self._asked

    def look(self, now: float) -> None:
        if self._asked is None or now - self._asked >= self._every_s:
            self._asked = now
            self._turn += 1
            self._propose(worker_messages.StateDue(self._turn))


class SnapshotCadence:
    """How many reports there are from one snapshot to the next, at all ranks: from what a copy costs, and how
    fast training is.
    """

    def __init__(
        self,
        memory: MemoryConfig | None,
        propose: Callable[[worker_messages.AnyValue], None],
        say: Callable[[str], None],
    ) -> None:
        self.reports = 0 if memory is None else 1
        """0: there are no snapshots."""
        self._every_s = memory.every_s if memory is not None else None
        self._propose = propose
        self._say = say
        self._copies: dict[int, float] = {}
        """What a copy costs each rank."""
        self._whole: dict[int, float] = {}
        """How long one takes at each rank, if training goes on meanwhile."""
        self._sent: dict[int, float] = {}
        """How long it takes until another host has a copy."""
        self._pace: deque[tuple[float, int, bool]] = deque(maxlen=_REPORTS)
        """(time, index, whether a snapshot was taken) of one rank's last reports."""
        self._is_known = True

    def restart(self) -> None:
        """Workers start, and know the cadence."""
        self._pace.clear()
        self._is_known = True

    def adopt(self) -> None:
        """Workers of an earlier driver know that one's cadence."""
        self._is_known = False

    def reported(self, rank: int, index: int, copy_s: float, now: float) -> None:
        if not self.reports:
            return
        if copy_s:
            _note(self._copies, rank, copy_s)
        if rank == 0:
            self._pace.append((now, index, copy_s > 0))

    def taken(self, rank: int, copy_s: float, whole_s: float) -> None:
        """A snapshot is whole, which took so long, and of that training waited ``copy_s``."""
        if self.reports:
            _note(self._copies, rank, copy_s)
            _note(self._whole, rank, whole_s)

    def sent(self, rank: int, seconds: float) -> None:
        """Another host has a copy of a rank's snapshot, which took so long."""
        _note(self._sent, rank, seconds)

    def refused(self, rank: int, reason: str) -> None:
        """A rank's host has no memory for it: the snapshots of the others are of no use without it."""
        if self.reports:
            self._say(
                f"no snapshots in memory: rank {rank} has no room for them ({reason}). The run goes on with "
                "storage alone. Give the host more memory, run fewer workers on it, or raise "
                "MemoryConfig.host_fraction"
            )
            self._change(0)

    def look(self) -> None:
        """Propose another cadence if this one is far from what is wanted."""
        if not self.reports or not self._copies or len(self._pace) < 2:
            return
        wanted = self._wanted()
        if not self._is_known or abs(wanted - self.reports) > _CLOSE * self.reports:
            self._change(wanted)

    def _wanted(self) -> int:
        (began, first, before), (ended, last, _) = self._pace[0], self._pace[-1]
        copy_s = max(self._copies.values())
        # A report comes after its copy: what the first one cost was before that.
        copies = sum(taken for _, _, taken in self._pace) - before
        step_s = max(1e-6, (ended - began - copies * copy_s) / max(1, last - first))
        if self._every_s == 0:
            return 1
        whole_s = max(self._whole.values(), default=0.0) + max(self._sent.values(), default=0.0)
        fewest = max(1, math.ceil(_MARGIN * whole_s / step_s))
        if self._every_s is not None:
            return max(fewest, round(self._every_s / step_s))
        return max(fewest, math.ceil(copy_s * (1 / MAX_STALL - 1) / step_s))

    def _change(self, reports: int) -> None:
        self.reports, self._is_known = reports, True
        self._propose(worker_messages.SnapshotEvery(reports))


def _note(times: dict[int, float], rank: int, seconds: float) -> None:
    times[rank] = (times.get(rank, seconds) + seconds) / 2
