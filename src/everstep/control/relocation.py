"""Moving workers that could train on: growing, leaving slices that will be taken away, changing to new code.

The first two take the new place before they give up the old one. If that fails, training was never disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from everstep.control import commands as c
from everstep.control.budgets import Backoff
from everstep.control.commands import AskReason
from everstep.control.events import TimerName
from everstep.control.fleet import Fleet
from everstep.control.group import Group
from everstep.control.notices import Notices
from everstep.control.settings import Settings
from everstep.control.standby import Standbys
from everstep.topology.slices import HostId, SliceName

Groups = Mapping[int, Group]

NEW_CODE = "the training function or its config changed"


class Relocation:
    """Says when to move, and keeps the new place ready. Moving itself is a restart, and the controller's."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        do: Callable[[c.AnyCommand], None],
        next_key: Callable[[], int],
    ) -> None:
        self.settings = settings
        self.fleet = fleet
        self.notices = Notices(settings, fleet, do)
        self.standbys = Standbys(settings, fleet, do, next_key)
        self.asked = AskReason.NONE
        self.outdated = False
        """The workers were taken over from an earlier driver, and run other code than this one has."""
        self._do = do
        self._is_leaving = False
        """What is kept is for workers whose slice will be taken away, and not for growth."""
        self._grow_from = 0.0
        self._refuge_from = 0.0
        self._backoff = Backoff(settings.deadlines)

    # ------------------------------------------------------------------ looking at what is

    def started(self, at: float) -> None:
        """Workers have just started: they are left in peace for a while."""
        self._grow_from = max(self._grow_from, at + self.settings.resize_interval_s)

    def leaving(self, groups: Groups) -> set[SliceName]:
        """Slices that workers train in and that will be taken away."""
        fleet = self.fleet
        if not fleet.noticed:
            return set()
        live = {h.slice for h in fleet.hosts.values() if h.alive}
        return {
            name
            for name in fleet.noticed.keys() & live
            if any(group.trains_in(name) for group in groups.values())
        }

    def reconsider(
        self, groups: Groups, restarting: Collection[int], taken: Collection[SliceName], at: float
    ) -> None:
        """The run trains. Is there a better place, and can it be had?

        ``restarting``: groups that are being replaced; ``taken``: slices that are kept for them.
        """
        leaving = self.leaving(groups)
        self._is_leaving = bool(leaving)
        if leaving:
            refuge = self._refuge(groups, restarting, taken, at)
            if refuge is not None:
                self._take(refuge[1] - self.fleet.held, self._refuge_from, at)
            place = refuge[1] if refuge is not None else frozenset()
            ready = bool(place) and place <= self.fleet.held and self.standbys.ready
            wanted = any(self.notices.want_save(name, ready, at) for name in leaving)
            self._ask(AskReason.PREEMPTION if wanted else AskReason.NONE)
            return
        if self.asked is AskReason.PREEMPTION:
            self._ask(AskReason.NONE)
        if self.outdated:
            if self.standbys:
                self._drop(None, at)
            self._ask(AskReason.NEW_CODE)
        elif not restarting:
            self._consider_growth(groups, at)

    def _consider_growth(self, groups: Groups, at: float) -> None:
        larger = self._larger(groups, at)
        if larger is None:
            if self.standbys or self.asked is AskReason.RESIZE:
                self._drop(None, at)
        elif self.standbys:
            self.check_ready()
        elif larger - self.fleet.held:
            self._take(larger - self.fleet.held, self._grow_from, at)
        elif at < self._grow_from:
            self._do(c.SetTimer(TimerName.GROW, 0, self._grow_from))
        else:  # the slices that we hold have room for more
            self._ask(AskReason.RESIZE)

    def _larger(self, groups: Groups, at: float) -> frozenset[SliceName] | None:
        current = sum(len(group.ranks) for group in groups.values())
        if current >= self.settings.workers_max:
            return None
        found = self.fleet.place_all(at)
        return found.slice_names if found is not None and found.world_size > current else None

    def saved(self, groups: Groups, at: float) -> bool:
        """A checkpoint was committed. False: not one that was asked for because of a notice."""
        if self.asked is not AskReason.PREEMPTION:
            return False
        self.notices.saved(self.leaving(groups), at)
        return True

    def change_over(self, groups: Groups, at: float) -> str:
        """A checkpoint was committed: why this is the boundary at which to start anew. Nothing: it isn't."""
        if self.outdated:
            return NEW_CODE
        if self.asked is not AskReason.RESIZE:
            return ""
        larger = self._larger(groups, at)
        if larger is not None and larger <= self.fleet.held:
            return "resize"
        self._drop(None, at)
        return ""

    # ------------------------------------------------------------------ the new place

    def _take(self, slices: frozenset[SliceName], not_before: float, at: float) -> None:
        wanted = slices - self.standbys.slices
        if not wanted:
            return
        if at < not_before:
            self._do(c.SetTimer(TimerName.GROW, 0, not_before))
        else:
            self.standbys.take(wanted, at)

    def granted(self, reservation: int, at: float) -> None:
        if self.standbys.granted(reservation, at):
            self.check_ready()

    def check_ready(self) -> bool:
        """Whether there is a new place, and nothing of it is missing any more."""
        if not self.standbys or not self.standbys.ready:
            return False
        self.standbys.stop_waiting()
        if self.asked is AskReason.NONE and not self._is_leaving:
            self._ask(AskReason.RESIZE)
        return True

    def failed(self, reservation: int, at: float) -> None:
        """It was refused, or a time limit has passed."""
        self._drop([reservation], at)

    def host_failed(self, host: HostId, at: float) -> None:
        concerned = self.standbys.on(host)
        if concerned:
            self._drop(concerned, at)

    def _drop(self, reservations: Collection[int] | None, at: float) -> None:
        """It did not work out. Another try comes after a pause."""
        limits = self.settings.deadlines
        self._refuge_from = at + max(limits.backoff_first_s, self._backoff.next_pause(at))
        self._grow_from = at + self.settings.resize_interval_s
        self.standbys.give_back(reservations)
        urgent = self._is_leaving
        if not urgent:
            self._ask(AskReason.NONE)
        self._do(c.SetTimer(TimerName.GROW, 0, self._refuge_from if urgent else self._grow_from))

    def absorb(self) -> None:
        """Workers restart, and may use what was taken."""
        self.standbys.hand_over()
        if self.asked is AskReason.RESIZE:
            self._ask(AskReason.NONE)

    def _ask(self, reason: AskReason) -> None:
        if self.asked is not reason:
            self.asked = reason
            self._do(c.AskCheckpoint(reason))

    def ask_for_the_end(self) -> None:
        self._ask(AskReason.STOP)

    def ask_nothing(self) -> None:
        self._ask(AskReason.NONE)

    # ------------------------------------------------------------------ leaving

    def leave_now(
        self,
        groups: Groups,
        restarting: Collection[int],
        taken: Collection[SliceName],
        at: float,
        just_saved: bool = False,
    ) -> set[int]:
        """The groups that move now, because their slice will be gone soon and a place for them is kept.

        They leave late, not at once: notices that follow each other then lead to one restart. With the last
        checkpoint just committed no step is lost by that, so it is not waited any longer.
        """
        leaving = self.leaving(groups)
        if not self.notices.due(leaving, 2 if just_saved else 1, at) or not self.standbys.ready:
            return set()
        refuge = self._refuge(groups, restarting, taken, at)
        if refuge is None or not refuge[1] <= self.fleet.held:
            return set()  # train on for as long as it lasts
        going, slices = refuge
        if slices:
            return going
        # They wait for a place: those whose time is up, and who don't leave somebody else in their slice.
        staying = {name for g in groups.values() if g.number not in going for name in g.slices()}
        alone = self.notices.due(leaving, 1, at) - staying - set(taken)
        return {g for g in going if groups[g].slices() & alone}

    def _refuge(
        self, groups: Groups, restarting: Collection[int], taken: Collection[SliceName], at: float
    ) -> tuple[set[int], frozenset[SliceName]] | None:
        """Which groups would leave, and for which slices."""
        leaving = self.leaving(groups)
        going = {g.number for g in groups.values() if g.slices() & leaving and not g.finished}
        going -= set(restarting)
        if not going:
            return None
        others = [g for g in groups.values() if g.number not in going]
        if self.settings.group_size is not None and any(
            not g.finished for g in others if g.number not in restarting
        ):
            everyone = [a for g in groups.values() for a in g.members.values()]
            moving = [a for g in sorted(going) for a in groups[g].members.values()]
            # Groups that are being replaced go back to where they were, as far as that is still there.
            kept = {name for g in others for name in g.slices()} | set(taken)
            places = self.fleet.place_again(moving, everyone, kept, at)
            slices = frozenset(a.slice for a in places)
            if places and not slices & leaving:
                return going, slices
            # Nowhere to go. They leave nevertheless, if enough stay: who is killed in the middle of a step
            # costs the others that step.
            enough = len(groups) - len(going | set(restarting)) >= self.settings.groups_min
            return (going, frozenset()) if enough else None
        if restarting:
            return None  # they come first
        placement = self.fleet.place_all(at, staying_only=True)
        return (going, placement.slice_names) if placement is not None else None
