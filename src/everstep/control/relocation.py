"""Moving workers that could train on: growing, leaving slices that will be taken away, changing to new code.

The first two take the new place before they give up the old one. If that fails, training was never disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from everstep.control import commands as c
from everstep.control.budgets import Backoff
from everstep.control.commands import AskReason
from everstep.control.events import Notice, TimerName
from everstep.control.fleet import Fleet
from everstep.control.group import Group
from everstep.control.settings import Settings
from everstep.topology.slices import HostId, SliceName

Groups = Mapping[int, Group]

NEW_CODE = "the training function or its config changed"


class Standby:
    """Slices taken while training goes on, for workers that will move there."""

    def __init__(self, slices: frozenset[SliceName], hosts: frozenset[HostId]) -> None:
        self.slices = slices
        self.hosts = hosts
        self.reserved = False


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
        self._standbys: dict[int, Standby] = {}
        """By reservation. Notices that follow each other may need several."""
        self.asked = AskReason.NONE
        self.outdated = False
        """The workers were taken over from an earlier driver, and run other code than this one has."""
        self._do = do
        self._next_key = next_key
        self._is_leaving = False
        """What is kept is for workers whose slice will be taken away, and not for growth."""
        self._saved: dict[SliceName, float] = {}
        """When a checkpoint was last committed, of slices with a notice since which one was."""
        self._unlisted: dict[HostId, float] = {}
        """Deadlines of machines that the engine has not listed yet."""
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
            ready = bool(place) and place <= self.fleet.held and self._is_ready()
            wanted = any(self._wants_save(name, ready, at) for name in leaving)
            self._ask(AskReason.PREEMPTION if wanted else AskReason.NONE)
            return
        if self.asked is AskReason.PREEMPTION:
            self._ask(AskReason.NONE)
        if self.outdated:
            if self._standbys:
                self._drop(list(self._standbys), at)
            self._ask(AskReason.NEW_CODE)
        elif not restarting:
            self._consider_growth(groups, at)

    def _consider_growth(self, groups: Groups, at: float) -> None:
        larger = self._larger(groups, at)
        if larger is None:
            if self._standbys or self.asked is AskReason.RESIZE:
                self._drop(list(self._standbys), at)
        elif self._standbys:
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

    def change_over(self, groups: Groups, at: float) -> str:
        """A checkpoint was committed: why this is the boundary at which to start anew. Nothing: it isn't."""
        if self.outdated:
            return NEW_CODE
        if self.asked is not AskReason.RESIZE:
            return ""
        larger = self._larger(groups, at)
        if larger is not None and larger <= self.fleet.held:
            return "resize"
        self._drop(list(self._standbys), at)
        return ""

    # ------------------------------------------------------------------ the new place

    @property
    def kept(self) -> frozenset[SliceName]:
        """Slices that are taken, or asked for, while training goes on."""
        return frozenset(name for standby in self._standbys.values() for name in standby.slices)

    def is_for_standby(self, reservation: int) -> bool:
        return reservation in self._standbys

    def _take(self, slices: frozenset[SliceName], not_before: float, at: float) -> None:
        wanted = slices - self.kept
        if not wanted:
            return
        if at < not_before:
            self._do(c.SetTimer(TimerName.GROW, 0, not_before))
            return
        hosts = frozenset(h.id for h in self.fleet.hosts.values() if h.slice in wanted and h.alive)
        reservation = self._next_key()
        self._standbys[reservation] = Standby(wanted, hosts)
        self.fleet.reserve(reservation, wanted, at)

    def granted(self, reservation: int, at: float) -> None:
        standby = self._standbys[reservation]
        if self.fleet.granted(reservation):
            standby.reserved = True
            self.fleet.prepare(standby.hosts)
            limit = at + self.settings.deadlines.prepare_s
            self._do(c.SetTimer(TimerName.PREPARE, reservation, limit))
            self.check_ready()

    def _is_ready(self) -> bool:
        return all(s.reserved and s.hosts <= self.fleet.prepared for s in self._standbys.values())

    def check_ready(self) -> bool:
        """Whether there is a new place, and nothing of it is missing any more."""
        if not self._standbys or not self._is_ready():
            return False
        for reservation in self._standbys:
            self._do(c.CancelTimer(TimerName.PREPARE, reservation))
        if self.asked is AskReason.NONE and not self._is_leaving:
            self._ask(AskReason.RESIZE)
        return True

    def failed(self, reservation: int, at: float) -> None:
        """It was refused, or a time limit has passed."""
        self._drop([reservation], at)

    def host_failed(self, host: HostId, at: float) -> None:
        concerned = [number for number, standby in self._standbys.items() if host in standby.hosts]
        if concerned:
            self._drop(concerned, at)

    def _drop(self, reservations: Collection[int], at: float) -> None:
        """It did not work out. Another try comes after a pause."""
        limits = self.settings.deadlines
        self._refuge_from = at + max(limits.backoff_first_s, self._backoff.next_pause(at))
        self._grow_from = at + self.settings.resize_interval_s
        for reservation in reservations:
            standby = self._standbys.pop(reservation)
            self._forget(reservation)
            self.fleet.release(standby.slices)
        urgent = self._is_leaving
        if not urgent:
            self._ask(AskReason.NONE)
        self._do(c.SetTimer(TimerName.GROW, 0, self._refuge_from if urgent else self._grow_from))

    def absorb(self) -> None:
        """Workers restart: what was taken can be part of that; what was only asked for is not waited for."""
        for reservation in self._standbys:
            self._forget(reservation)
        self._standbys.clear()
        if self.asked is AskReason.RESIZE:
            self._ask(AskReason.NONE)

    def _forget(self, reservation: int) -> None:
        self.fleet.withdraw(reservation)
        self._do(c.CancelTimer(TimerName.PREPARE, reservation))

    def _ask(self, reason: AskReason) -> None:
        if self.asked is not reason:
            self.asked = reason
            self._do(c.AskCheckpoint(reason))

    def ask_for_the_end(self) -> None:
        self._ask(AskReason.STOP)

    def ask_nothing(self) -> None:
        self._ask(AskReason.NONE)

    # ------------------------------------------------------------------ notices

    def saved(self, groups: Groups, at: float) -> bool:
        """A checkpoint was committed. If it was asked for because of a notice, another one is wanted only
        shortly before the slice is left. False: nobody asked for this one.
        """
        if self.asked is not AskReason.PREEMPTION:
            return False
        self._saved.update(dict.fromkeys(self.leaving(groups), at))
        return True

    def _wants_save(self, name: SliceName, ready: bool, at: float) -> bool:
        """One at the notice, unless the last one comes soon; and the last one: once there is somewhere to go,
        or there is no more time to wait for that.
        """
        last, saved, end = self._last_save(name), self._saved.get(name), self.fleet.noticed[name]
        if at < last:
            return saved is None and last - at > self.settings.migrate_margin_s
        late = at >= end - self.fleet.margin(name)
        return at < end and (ready or (late and (saved is None or saved < last)))

    def _last_save(self, name: SliceName) -> float:
        """From when on a last checkpoint is wanted: once it is there, the workers leave."""
        return self.fleet.noticed[name] - 2 * self.fleet.margin(name)

    def noticed(self, host: HostId, deadline: float, at: float) -> None:
        """One host of a slice noticed means the whole slice; the earliest deadline counts."""
        view = self.fleet.hosts.get(host)
        if view is None:  # the word of it has overtaken that of its machine
            self._unlisted[host] = deadline
            return
        if not view.alive:
            return
        name = view.slice
        known = self.fleet.deadline_of(host)
        # One whose time is over says nothing against a new one.
        if known is None or deadline < known or known <= at < deadline:
            hosts = self.fleet.machines(name)
            self.fleet.notice(Notice(name, deadline, hosts))
            self._do(c.PreemptionSeen(at, name, deadline, hosts))
            self._saved.pop(name, None)
            self.fleet.margins[name] = min(self.settings.migrate_margin_s, max(0.0, deadline - at) / 4)
            self._set_alarm(at)

    def listed(self, at: float) -> None:
        """Machines have become known: notices for them may have come before."""
        for host, deadline in list(self._unlisted.items()):
            over = at >= deadline + self.settings.deadlines.notice_s
            if over or host in self.fleet.hosts:
                del self._unlisted[host]
                if not over:
                    self.noticed(host, deadline, at)

    def recall(self, notices: Collection[Notice], used: Collection[SliceName], at: float) -> None:
        """What an earlier driver was told still counts, of machines that are there or that workers are on."""
        for notice in notices:
            if notice.slice in used or any(map(self.fleet.alive, notice.hosts)):
                self.fleet.notice(notice)
        self.alarm(at)

    def host_cancelled(self, host: HostId, at: float) -> bool:
        """The notice of this machine, and so of its slice, was taken back. False: there was none."""
        self._unlisted.pop(host, None)
        view = self.fleet.hosts.get(host)
        return view is not None and self.cancelled(view.slice, at)

    def cancelled(self, name: SliceName, at: float) -> bool:
        if self.fleet.noticed.pop(name, None) is None:
            return False
        self._do(c.PreemptionSeen(at, name, None))
        self._set_alarm(at)
        return True

    def alarm(self, at: float) -> None:
        """Notices whose time is long over were not meant: the host lives."""
        for name, deadline in list(self.fleet.noticed.items()):
            if at >= deadline + self.settings.deadlines.notice_s:
                self.cancelled(name, at)
        self._set_alarm(at)

    def _set_alarm(self, at: float) -> None:
        """For the next time at which a notice means something else than now."""
        moments = [
            moment
            for name, deadline in self.fleet.noticed.items()
            for moment in (
                self._last_save(name),
                deadline - self.fleet.margin(name),
                deadline + self.settings.deadlines.notice_s,
            )
            if moment > at
        ]
        if moments:
            self._do(c.SetTimer(TimerName.MIGRATE, 0, min(moments)))
        else:
            self._do(c.CancelTimer(TimerName.MIGRATE, 0))

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
        checkpoint just committed no step is lost by that, so it is not waited any longer. Once the deadline
        has passed, nobody leaves: the slice dies now, or it was never meant.
        """
        margins = 2 if just_saved else 1
        noticed = {name: self.fleet.noticed[name] for name in self.leaving(groups)}
        if not any(end - margins * self.fleet.margin(name) <= at < end for name, end in noticed.items()):
            return set()
        if not self._is_ready():
            return set()
        refuge = self._refuge(groups, restarting, taken, at)
        if refuge is None or not refuge[1] <= self.fleet.held:
            return set()  # train on for as long as it lasts
        going, slices = refuge
        if slices:
            return going
        # They wait for a place: those whose time is up, and who don't leave somebody else in their slice.
        staying = {name for g in groups.values() if g.number not in going for name in g.slices()}
        soon = {name for name, end in noticed.items() if end - self.fleet.margin(name) <= at < end}
        return {g for g in going if groups[g].slices() & (soon - staying - set(taken))}

    def _refuge(
        self, groups: Groups, restarting: Collection[int], taken: Collection[SliceName], at: float
    ) -> tuple[set[int], frozenset[SliceName]] | None:
        """Which groups would leave, and for which slices."""
        leaving = self.leaving(groups)
        going = {g.number for g in groups.values() if g.slices() & leaving and not g.finished} - set(
            restarting
        )
        staying = [g for g in groups.values() if g.number not in going and g.number not in restarting]
        if not going:
            return None
        if self.settings.group_size is not None and any(not g.finished for g in staying):
            everyone = [a for g in groups.values() for a in g.members.values()]
            moving = [a for g in sorted(going) for a in groups[g].members.values()]
            # Groups that are being replaced go back to where they were, as far as that is still there.
            others = {name for g in groups.values() if g.number not in going for name in g.slices()}
            places = self.fleet.place_again(moving, everyone, others | set(taken), at)
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
