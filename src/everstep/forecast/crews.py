"""The hosts that train, by replica group, and the account of their time.

Every second of every host that the job wants is charged to one category here; how a stretch of training
divides into steps and checkpoints is in ``training``. Nothing here schedules anything or talks to the
controller: ``commands``, ``checkpoints`` and ``hosts`` say what a crew does next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from everstep.control.commands import StartWorkers
from everstep.control.group import Group
from everstep.control.restart import Restart
from everstep.control.table import Phase
from everstep.forecast.figures import Figures
from everstep.forecast.memory import HeldSnapshots
from everstep.forecast.places import Places
from everstep.forecast.training import Cadence, Stopped, Stretch
from everstep.goodput import Category
from everstep.topology.slices import HostId


class TimeSheet:
    """What some hosts do, and since when."""

    def __init__(self, hosts: int, category: Category, since: float, figures: Figures) -> None:
        self.hosts = hosts
        self.category = category
        self.since = since
        self._figures = figures

    def turn(self, category: Category, now: float) -> None:
        """Charge the time until now, and do something else from now on."""
        self._figures.ledger.charge(self.category, self.hosts, self.since, now)
        self.category, self.since = category, now


class Crew(TimeSheet):
    """The hosts of one replica group. Without replica groups there is one crew, of all hosts."""

    def __init__(self, group: int, hosts: int, category: Category, since: float, figures: Figures) -> None:
        super().__init__(hosts, category, since, figures)
        self.group = group
        self.stretch: Stretch | None = None
        """While it trains. The stretch then accounts for the time, in place of the category."""

    def turn(self, category: Category, now: float) -> None:
        assert self.stretch is None, "a crew that trains is cut off first"
        super().turn(category, now)

    def train(self, cadence: Cadence, now: float) -> None:
        self.turn(Category.STEP, now)
        self.stretch = Stretch(cadence, now, self.hosts)

    def cut_off(self, now: float, kept: bool, host_lost: bool = False) -> Stopped | None:
        """End its stretch, if it trains. ``kept``: the steps since the last checkpoint aren't lost."""
        if self.stretch is None:
            return None
        stopped = self.stretch.cut_off(now, self._figures.ledger, kept, host_lost)
        self._figures.lost_s += stopped.lost_s
        self.stretch = None
        self.category, self.since = Category.RESTART, now
        return stopped


class Crews:
    """The crews of the present attempt, and the hosts that the job wants and doesn't have."""

    def __init__(self, hosts_wanted: int, cadence: Cadence, figures: Figures) -> None:
        self.places = Places()
        self._hosts_wanted = hosts_wanted
        self._cadence = cadence
        self._figures = figures
        self._by_group: dict[int, Crew] = {}
        self._snapshots = HeldSnapshots(figures)
        self._absent = TimeSheet(hosts_wanted, Category.RESTART, 0.0, figures)
        self._stages: dict[int, Phase] = {}
        """The stage that each restart was last seen in, by its key."""

    def __getitem__(self, group: int) -> Crew:
        return self._by_group[group]

    def __iter__(self) -> Iterator[Crew]:
        return iter(self._by_group.values())

    def on(self, host: HostId) -> Crew | None:
        """The crew that has this host."""
        group = self.places.group_on.get(host)
        return None if group is None else self._by_group[group]

    def start(self, command: StartWorkers, groups: Iterable[Group], now: float) -> None:
        """``groups``: all that there are now, also those that wait for a place."""
        if command.full:
            unplaced = [group for group in groups if group.nowhere]
            self._begin_attempt(command.assignments[0].world_size, unplaced, now)
        for group, hosts in self.places.start(command).items():
            if group in self._by_group:
                self._by_group[group].turn(Category.RESTART, now)
            else:
                self._by_group[group] = Crew(group, hosts, Category.RESTART, now, self._figures)

    def _begin_attempt(self, world_size: int, unplaced: Iterable[Group], now: float) -> None:
        for crew in self:
            self._cut_off(crew, now, kept=False)
            crew.turn(Category.RESTART, now)
        self._absent.turn(Category.WAITING, now)
        self._absent.hosts = self._hosts_wanted - world_size
        self._by_group = {
            group.number: Crew(group.number, len(group.ranks), Category.WAITING, now, self._figures)
            for group in unplaced
        }

    def restore(self, crews: Iterable[Crew], now: float) -> bool:
        """Returns whether all of them have their state from memory."""
        from_memory = True
        for crew in crews:
            crew.turn(Category.RESTORE, now)
            from_memory &= self._snapshots.restores(crew.group)
        return from_memory

    def train(self, crews: Iterable[Crew], since: float, now: float) -> None:
        """These crews, which began to restore at ``since``, train from now on; except those that were stopped
        meanwhile, which may already restore again.
        """
        for crew in crews:
            if crew.category is Category.RESTORE and crew.since == since:
                crew.train(self._cadence, now)
        if all(crew.stretch is not None for crew in self):
            self._figures.all_train(now)

    def _cut_off(self, crew: Crew, now: float, kept: bool, host_lost: bool = False) -> None:
        stopped = crew.cut_off(now, kept, host_lost)
        if stopped is not None:
            self._snapshots.stopped(crew.group, stopped, self.places.assignments(crew.group))

    def host_lost(self, host: HostId) -> None:
        self._snapshots.host_lost(host)

    def stall(self, crew: Crew, now: float, host_lost: bool) -> None:
        """One of its workers is gone: the others wait for it, in a collective or to restore, until that is
        noticed.

        Its steps since the last checkpoint are lost only if no other replica group trains on with them.
        """
        kept = any(other.stretch is not None for other in self if other is not crew)
        self._cut_off(crew, now, kept, host_lost)
        crew.turn(Category.DETECT, now)

    def stop(self, groups: Iterable[int], now: float) -> None:
        for group in groups:
            crew = self[group]
            if crew.stretch is not None:
                self._figures.interrupted(now)
                self._cut_off(crew, now, kept=False)
            else:
                crew.turn(Category.RESTART, now)

    def follow(self, restarts: Iterable[Restart], now: float) -> None:
        """Crews that are being restarted wait for capacity, or restart, as their restart does."""
        for restart in restarts:
            if self._stages.get(restart.key) is restart.stage:
                continue
            self._stages[restart.key] = restart.stage
            category = Category.WAITING if restart.stage is Phase.WAITING else Category.RESTART
            for crew in self if restart.full else [self[group] for group in restart.groups]:
                if crew.stretch is None and crew.category is not Category.RESTORE:
                    crew.turn(category, now)
            if not self._by_group:
                self._absent.turn(category, now)

    def end(self, now: float) -> None:
        """The forecast is over: charge what hasn't been charged yet."""
        for crew in self:
            crew.cut_off(now, kept=True)
            crew.turn(crew.category, now)
        self._absent.turn(self._absent.category, now)
