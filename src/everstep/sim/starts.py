"""What must hold whenever workers are started: whole slices, dense ranks, and the newest state."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller, beliefs_of
from everstep.saved.snapshots import At
from everstep.sim.cluster import Cluster
from everstep.sim.known import KnownCluster
from everstep.sim.scenario import FaultKind, Scenario
from everstep.sim.time import require
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, natural_key

if TYPE_CHECKING:
    from everstep.sim.invariants import RunFacts


class Starts:
    """By one controller."""

    def __init__(
        self,
        scenario: Scenario,
        cluster: Cluster,
        facts: RunFacts,
        controller: Controller,
        known: KnownCluster,
    ) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._facts = facts
        self._controller = controller
        self._known = known
        self._epoch = 0
        """The last that was begun."""

    def opened(self, event: e.RunOpened) -> None:
        self._epoch = max(event.last_epoch, event.adopted.epoch if event.adopted is not None else 0)
        self._facts.places = {a.rank: a for a in event.adopted.assignments} if event.adopted else {}

    def check(self, command: c.StartWorkers) -> None:
        """1, 5, 10 and 11."""
        facts, places = self._facts, command.assignments
        full = command.epoch != self._epoch
        facts.starts += 1
        self._check_snapshot(command, full)
        self._check_checkpoint(command)
        if full:
            require(command.epoch > self._epoch, "epochs grow")
            require(all(g == 0 for _, g in command.generations), "an epoch begins with generation 0")
            self._epoch = command.epoch
            if command.snapshot is None:
                facts.begun_anew = command.epoch
            facts.places = {}
            self._check_ranks(places)
        else:
            self._check_same_ranks(places)
            self._check_replaced(command)
        facts.places.update((a.rank, a) for a in places)
        run = beliefs_of(self._controller)
        replaced = {g for restart in run.restarts for g in restart.groups}
        require(full or bool(run.groups.keys() - replaced), "nobody trains: all restart")
        if not any(group.finished for group in run.groups.values()) and len(run.restarts) == 1:
            self._check_whole_slices()

    def _check_replaced(self, command: c.StartWorkers) -> None:
        """3: of a group that is replaced, nothing is left running on hosts that the run has."""
        generations, fleet = dict(command.generations), beliefs_of(self._controller).fleet
        for worker in self._cluster.workers():
            spec, agent = worker.spec, worker.agent
            new = generations.get(spec.assignment.group_id, 0)
            is_left = worker.running and spec.epoch == command.epoch and spec.generation < new
            is_ours = agent.slice.name in fleet.held and fleet.alive(agent.host)
            require(not (is_left and is_ours), f"3: rank {worker.rank} is replaced, and runs on {agent.host}")

    def _check_snapshot(self, command: c.StartWorkers, full: bool) -> None:
        """10: never older than the newest that every rank has."""
        whole = self._newest_whole({a.host for a in command.assignments}) if full else None
        if whole is not None and whole.epoch < self._facts.begun_anew:
            whole = None
        # What storage has, or has had, needs no snapshot: it is let go for a newer state, and at a resize.
        ever = max(((ref.epoch, ref.index) for ref in self._known.committed.values()), default=None)
        require(
            whole is None
            or (ever is not None and ever >= whole)
            or (command.snapshot is not None and command.snapshot >= whole),
            f"10: every rank has {whole} in memory, and restores {command.snapshot}",
        )
        saved = max(((ref.epoch, ref.index) for ref in self._known.restorable()), default=None)
        require(
            command.snapshot is None or saved is None or saved <= command.snapshot,
            f"10: {saved} is committed, and {command.snapshot} is restored from memory",
        )

    def _newest_whole(self, hosts: set[HostId]) -> At | None:
        """The newest that these hosts have between them, and have reported."""
        found: dict[tuple[At, int], set[int]] = {}
        for host in hosts:
            for rank, held in self._cluster.hosts[host].memory.held():
                if (host, rank, held.at) in self._known.copies:
                    found.setdefault((held.at, held.ranks), set()).add(rank)
        return max((at for (at, ranks), there in found.items() if len(there) == ranks), default=None)

    def _check_checkpoint(self, command: c.StartWorkers) -> None:
        """5: committed, and the newest."""
        newest = self._known.restorable()
        if newest and self._scenario.families & {FaultKind.LISTING, FaultKind.RETURN}:
            # Those of an earlier attempt may have been found after a later one had begun, or made by a host
            # that was lost and came back: the later attempt counts.
            newest = [ref for ref in newest if ref.epoch == max(ref.epoch for ref in newest)]
        if command.checkpoint is None:
            require(not newest, "5: a checkpoint is committed, and the workers get none")
            return
        there = any(ref.folder == command.checkpoint for ref in newest)
        require(there, "5: what is restored is not committed")
        steps = self._cluster.saves.steps
        mine, best = steps[command.checkpoint], max(steps[ref.folder] for ref in newest)
        require(mine >= best - self._slack(), f"5: what is restored is not the newest: {mine} < {best}")

    def _slack(self) -> float:
        """Replica groups are a little apart: by uploads, commits, and a step with each replacement."""
        if self._scenario.settings.group_size is None:
            return 0.0
        return 60.0 / self._scenario.step_s + 2 * self._scenario.checkpoint_every + self._facts.starts

    def _check_ranks(self, places: tuple[Assignment, ...]) -> None:
        """11."""
        settings, n = self._scenario.settings, len(places)
        # Replica groups that have no place yet count as well.
        wanted = n if settings.group_size is None else settings.workers_max
        require([a.rank for a in places] == list(range(n)), "11: ranks are dense")
        require({a.world_size for a in places} == {wanted}, "11: every worker agrees on N")
        require(settings.workers_min <= n <= settings.workers_max, "the size is what the user asked for")
        num_slices = len({a.slice for a in places})
        require(len({a.num_slices for a in places}) == 1, "11: every worker agrees on S")
        require(places[0].num_slices == num_slices or n < wanted, "11: S is the number of slices")
        require({a.slice_id for a in places} == set(range(num_slices)), "11: slice ids are dense")
        index = {agent.host: agent.index for agent in self._cluster.hosts.values()}
        order = [(natural_key(a.slice), index[a.host], a.local_rank) for a in places]
        require(order == sorted(order), "11: ranks are in topology order")
        on = Counter(a.host for a in places)
        require(
            all(a.local_world_size == on[a.host] for a in places),
            "11: every worker agrees on its host's number of workers",
        )

    def _check_same_ranks(self, places: tuple[Assignment, ...]) -> None:
        """11: ranks and group ids stay when a group is replaced."""
        known = self._facts.places
        for a in places:
            before = known.get(a.rank)
            if before is None:  # there was no place for it until now
                sizes = {place.world_size for place in known.values()}
                require(sizes <= {a.world_size}, "11: every worker agrees on N")
            else:
                require(_identity(a) == _identity(before), "11: ranks and group ids stay")

    def _check_whole_slices(self) -> None:
        """1."""
        scenario = self._scenario
        used: dict[str, Counter[str]] = {}
        for a in self._facts.places.values():
            used.setdefault(a.slice, Counter())[a.host] += 1
        for name, hosts in used.items():
            whole = len(hosts) == scenario.hosts_per_slice and set(hosts.values()) == {scenario.slots}
            require(whole or scenario.hosts_per_slice == 1, f"1: {name} is partly used")


def _identity(a: Assignment) -> tuple[int, ...]:
    return (a.rank, a.world_size, a.group_id, a.group_rank, a.num_slices, a.slice_id, a.num_groups)
