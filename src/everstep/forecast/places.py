"""Where the workers of each replica group run, and which incarnation of the group they are."""

from __future__ import annotations

from everstep.control.commands import StartWorkers
from everstep.identity import Incarnation
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId


class Places:
    """As of the last start of each group. There is one worker per host, which stands for all of its
    accelerators.
    """

    def __init__(self) -> None:
        self.group_on: dict[HostId, int] = {}
        self._assignments: dict[int, list[Assignment]] = {}
        self._incarnations: dict[int, Incarnation] = {}

    def start(self, command: StartWorkers) -> dict[int, int]:
        """Its groups run there from now on. Returns how many hosts each has."""
        if command.full:
            self._assignments.clear()
        started: dict[int, list[Assignment]] = {}
        for assignment in command.assignments:
            started.setdefault(assignment.group_id, []).append(assignment)
        self._assignments.update(started)
        for group, generation in command.generations:
            self._incarnations[group] = Incarnation(command.epoch, group, generation)
        self.group_on = {a.host: group for group, found in self._assignments.items() for a in found}
        return {group: len(found) for group, found in started.items()}

    def assignments(self, group: int) -> list[Assignment]:
        return self._assignments[group]

    def incarnation(self, group: int) -> Incarnation:
        return self._incarnations[group]

    def rank_on(self, host: HostId) -> int:
        return next(a.rank for a in self._assignments[self.group_on[host]] if a.host == host)
