"""What a controller can know of the cluster and of checkpoints from its events, and what it has taken, worked
out a second time. The checks use this and not the controller's state, so that they don't share its mistakes.
"""

from __future__ import annotations

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller, beliefs_of
from everstep.control.table import Phase
from everstep.saved.checkpoints import CheckpointRef
from everstep.saved.snapshots import At
from everstep.sim.scenario import Scenario
from everstep.sim.time import require
from everstep.topology.slices import HostId, HostView, SliceName


class KnownCluster:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._hosts: dict[HostId, HostView] = {}
        self.taken: dict[SliceName, int] = {}
        """Slices that are held or asked for, and by which reservation; 0 for those that were adopted."""
        self.committed: dict[str, CheckpointRef] = {}
        """All that were ever committed, as far as the driver knows."""
        self._gone: set[str] = set()
        """Those of them that retention let go of, or that are damaged."""
        self._committing: dict[str, CheckpointRef] = {}
        self._places: dict[tuple[int, int], HostId] = {}
        """By attempt and rank."""
        self.copies: set[tuple[HostId, int, At]] = set()
        """Which host has which rank's snapshot."""

    def add(self, event: e.Event) -> None:
        match event:
            case e.CapacityChanged():
                self._hosts = {host.id: host for host in event.hosts}
            case e.HostLost():
                self._lose(event.host)
            case e.RunOpened():
                places = event.adopted.assignments if event.adopted is not None else ()
                remains = event.remains.slices if event.remains is not None else ()
                self.taken = dict.fromkeys((*(place.slice for place in places), *remains), 0)
                self.committed = {ref.folder: ref for ref in (*event.let_go, *event.checkpoints)}
                self._gone = {ref.folder for ref in event.let_go}
                self._opened(event.adopted or event.remains)
            case e.Reported():
                host = self._places.get((event.epoch, event.rank))
                if host is not None:
                    self.copies |= {(host, event.rank, At(event.epoch, index)) for index in event.taken}
            case e.SnapshotCopied() if not event.failed:
                self.copies.add((event.host, event.rank, event.snapshot))
            case e.SnapshotDamaged():
                self.copies = {copy for copy in self.copies if copy[2] != event.snapshot}
            case e.CheckpointCommitted():
                self.committed[event.folder] = self._committing[event.folder]
            case e.CheckpointGone():
                self._gone.add(event.folder)
            case e.ReservationFailed():
                self.taken = {name: n for name, n in self.taken.items() if n != event.reservation}
            case _:
                pass

    def _opened(self, found: e.Adopted | e.Remains | None) -> None:
        self._places = {}
        if isinstance(found, e.Adopted):
            self._places = {(found.epoch, a.rank): a.host for a in found.assignments}
        copies = found.copies if found is not None else ()
        self.copies = {(copy.host, copy.rank, At(copy.epoch, copy.index)) for copy in copies}

    def _lose(self, host: HostId) -> None:
        view = self._hosts.get(host)
        if view is not None:
            self._hosts[host] = msgspec.structs.replace(view, alive=False)

    def check(self, command: c.AnyCommand) -> None:
        """1 and 3: whole slices are taken, each once, and each is given back once."""
        match command:
            case c.RetireHost():
                self._lose(command.host)
            case c.CommitCheckpoint():
                ready = command.checkpoint
                self._committing[ready.folder] = CheckpointRef(
                    ready.folder, command.epoch, ready.index, command.group, command.generation, command.order
                )
            case c.Reserve():
                for name in command.slices:
                    require(name in self.whole(), f"1: {name} is asked for, and is not whole and free")
                    require(name not in self.taken, f"3: {name} is asked for twice")
                    self.taken[name] = command.reservation
            case c.Release():
                for name in command.slices:
                    require(name in self.taken, f"3: {name} is given back twice")
                    del self.taken[name]
            case c.StartWorkers():
                self._places.update({(command.epoch, a.rank): a.host for a in command.assignments})
            case _:
                pass

    def restorable(self) -> list[CheckpointRef]:
        """Committed, not let go, and not known to be damaged."""
        return [ref for folder, ref in self.committed.items() if folder not in self._gone]

    def whole(self) -> set[SliceName]:
        """Slices with every host there, and nobody else in them."""
        living: dict[SliceName, set[int]] = {}
        for host in self._hosts.values():
            if host.alive and host.free:
                living.setdefault(host.slice, set()).add(host.index)
        return {name for name, found in living.items() if len(found) == self.scenario.hosts_per_slice}

    def check_size(self, controller: Controller) -> None:
        """7: a start of all workers is as large as capacity allows, and waits only if that is too little."""
        settings, fleet = self.scenario.settings, beliefs_of(controller).fleet
        planned = sum(len(restart.place.assignments) for restart in controller.restarts)
        usable = self.whole() - fleet.broken
        possible = self._size(len(usable - fleet.noticed.keys()))
        if possible < settings.workers_min:
            possible = max(possible, self._size(len(usable)))
        if possible >= settings.workers_min:
            require(
                planned >= possible, f"7: {planned} workers are planned, and there is room for {possible}"
            )

    def check_waiting(self, controller: Controller) -> None:
        """7: a replica group waits for a place only if there is none."""
        run = beliefs_of(controller)
        waiting = [r for r in run.restarts if r.stage is Phase.WAITING and not r.full]
        for restart in waiting:
            free = self.whole() - run.fleet.broken - run.fleet.noticed.keys() - run.used_by_others(restart)
            needed = {name for g in restart.groups for name in run.groups[g].slices()}
            require(
                len(free) < len(needed),
                f"7: groups {sorted(restart.groups)} wait, and there is room in {sorted(free)}",
            )

    def _size(self, slices: int) -> int:
        """How many workers fit into this number of slices."""
        per_slice = self.scenario.slots_in_slice
        most = min(self.scenario.settings.workers_max, slices * per_slice)
        wired = self.scenario.hosts_per_slice > 1
        return most - most % (per_slice if wired else self.scenario.settings.group_size or 1)
