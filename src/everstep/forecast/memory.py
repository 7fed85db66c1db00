"""Snapshots of the training state in the memory of the hosts that train, with copies on others: what is left
of them when training goes on.

When they are taken and what that costs is in ``training``.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.forecast.figures import Figures
from everstep.forecast.training import Stopped
from everstep.saved.snapshots import peers_of
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId


class _Held:
    """What a crew had when it stopped."""

    def __init__(self, stopped: Stopped, places: Iterable[Assignment]) -> None:
        places = [*places]
        self.stopped = stopped
        self.gone: set[HostId] = set()
        members = {place.rank: place.host for place in places}
        slices = {place.host: place.slice for place in places}
        copies = len(slices) if stopped.cadence.copies is None else stopped.cadence.copies
        self._peers = peers_of(members, slices, copies)

    @property
    def whole(self) -> bool:
        """Each host's part is there, or a peer's copy of it."""
        return not any(self.gone.issuperset((host, *peers)) for host, peers in self._peers.items())


class HeldSnapshots:
    """The newest of each crew that has stopped."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._held: dict[int, _Held] = {}

    def stopped(self, group: int, stopped: Stopped, places: Iterable[Assignment]) -> None:
        if stopped.in_memory:
            self._held[group] = _Held(stopped, places)
        else:
            self._held.pop(group, None)

    def host_lost(self, host: HostId) -> None:
        """Also one that comes back has lost what was in its memory."""
        for held in self._held.values():
            held.gone.add(host)

    def restores(self, group: int) -> bool:
        """Whether this crew's state comes from memory. If too much of it is gone, it comes from the newest
        checkpoint, and the steps since that are lost as well.
        """
        held = self._held.get(group)
        if held is None:
            return False
        if held.whole:
            return True
        del self._held[group]
        self._figures.lost_s += held.stopped.lose_snapshot(self._figures.ledger)
        return False
