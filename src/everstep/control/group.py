"""A replica group as the controller knows it. Without replica groups there is one, of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cached_property

from everstep.failures import Failure
from everstep.saved.reports import ReportBook
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, SliceName

MOST_BEHIND = 16
"""Reports. A rank that is further behind than this doesn't come to the same report in time."""

_NOBODY: frozenset[int] = frozenset()


class Group:
    """One incarnation: its members, and how far each has come."""

    def __init__(
        self, number: int, generation: int, members: Iterable[Assignment], reported: int = 0
    ) -> None:
        self.number = number
        self.generation = generation
        self.members = {member.rank: member for member in members}
        self.ranks = frozenset(self.members)
        self.ready: set[int] = set()
        self.returned: set[int] = set()
        self.failed: set[int] = set()
        """Ranks that have reported a failure, or whose end was one."""
        self.stepped: set[int] = set()
        """Ranks that have reported since this incarnation started."""
        self.stopping: set[int] = set()
        """Ranks that have been told to end."""
        self.nowhere = all(member.nowhere for member in self.members.values())
        """There is no place for it yet."""
        self.gone: set[int] = set(self.ranks) if self.nowhere else set()
        """Ranks whose process is known to have ended, or to be lost with its host."""
        self.book = ReportBook(self.ranks, reported)

    @property
    def finished(self) -> bool:
        return self.returned == self.ranks

    def judge(self, failure: Failure, ranks: Set[int]) -> Failure:
        """What befalls ranks that have not all joined yet is a failed start, whatever it was."""
        return failure if ranks <= self.ready else failure.while_starting()

    @property
    def awaits_report(self) -> bool:
        """Whether healthy ranks have yet to make a report that one which failed has made, and soon may."""
        lost = (self.failed | self.gone) - self.returned
        behind = [self.book.behind_by(rank, lost) for rank in self.ranks - lost - self.returned]
        return 0 < max(behind, default=0) <= MOST_BEHIND

    @cached_property
    def _by_host(self) -> dict[HostId, frozenset[int]]:
        return _ranks_by((member.host, rank) for rank, member in self.members.items())

    @cached_property
    def _by_slice(self) -> dict[SliceName, frozenset[int]]:
        return _ranks_by((member.slice, rank) for rank, member in self.members.items())

    def hosts(self) -> Set[HostId]:
        return self._by_host.keys()

    def slices(self) -> Set[SliceName]:
        return self._by_slice.keys()

    def ranks_on(self, host: HostId) -> frozenset[int]:
        return self._by_host.get(host, _NOBODY)

    def left_on(self, host: HostId) -> frozenset[int]:
        """The ranks on this host whose process may still run."""
        return self.ranks_on(host) - self.gone

    def trains_in(self, name: SliceName) -> bool:
        """Whether a rank in this slice has not returned yet."""
        return not self._by_slice.get(name, _NOBODY) <= self.returned


def _ranks_by(places: Iterable[tuple[str, int]]) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for key, rank in places:
        found.setdefault(key, set()).add(rank)
    return {key: frozenset(ranks) for key, ranks in found.items()}
