"""A replica group as the brain knows it. Without replica groups there is one, and it holds every rank."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.control.placement import Assignment
from everstep.control.reports import ReportBook
from everstep.topology.slices import HostId, SliceName


class Group:
    """One incarnation: its members, and how far each has come."""

    def __init__(
        self, number: int, generation: int, members: Iterable[Assignment], reported: int = 0
    ) -> None:
        self.number = number
        self.generation = generation
        self.members = {member.rank: member for member in members}
        self.ranks = frozenset(self.members)
        self.spawned: set[int] = set()
        self.ready: set[int] = set()
        self.returned: set[int] = set()
        self.stepped: set[int] = set()
        """Ranks that have reported since this incarnation started."""
        self.gone: set[int] = set()
        """Ranks whose process is known to have ended, or to be lost with its host."""
        self.book = ReportBook(self.ranks, reported)

    @property
    def finished(self) -> bool:
        return self.returned == self.ranks

    def hosts(self) -> frozenset[HostId]:
        return frozenset(member.host for member in self.members.values())

    def slices(self) -> frozenset[SliceName]:
        return frozenset(member.slice for member in self.members.values())

    def ranks_on(self, host: HostId) -> frozenset[int]:
        return frozenset(rank for rank, member in self.members.items() if member.host == host)

    def left_on(self, host: HostId) -> frozenset[int]:
        """The ranks on this host whose process may still run."""
        return self.ranks_on(host) - self.gone

    def trains_in(self, name: SliceName) -> bool:
        """Whether a rank in this slice has not returned yet."""
        return any(m.slice == name and rank not in self.returned for rank, m in self.members.items())
