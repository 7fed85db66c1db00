"""Slices that will be taken away: until when they stay, and when a checkpoint is wanted because of it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from everstep.control import commands as c
from everstep.control.events import Notice, TimerName
from everstep.control.fleet import Fleet
from everstep.control.settings import Settings
from everstep.topology.slices import HostId, SliceName


class Notices:
    def __init__(self, settings: Settings, fleet: Fleet, do: Callable[[c.AnyCommand], None]) -> None:
        self._settings = settings
        self._fleet = fleet
        self._do = do
        self._saved: dict[SliceName, float] = {}
        """When a checkpoint was last committed, of slices with a notice since which one was."""
        self._unlisted: dict[HostId, float] = {}
        """Deadlines of machines that the engine has not listed yet."""

    # ------------------------------------------------------------------ what is told

    def noticed(self, host: HostId, deadline: float, at: float) -> None:
        """One host of a slice noticed means the whole slice; the earliest deadline counts."""
        view = self._fleet.hosts.get(host)
        if view is None:  # the word of it has overtaken that of its machine
            self._unlisted[host] = deadline
            return
        if not view.alive:
            return
        name = view.slice
        known = self._fleet.deadline_of(host)
        # One whose time is over says nothing against a new one.
        if known is None or deadline < known or known <= at < deadline:
            hosts = self._fleet.machines(name)
            self._fleet.notice(Notice(name, deadline, hosts))
            self._do(c.PreemptionSeen(at, name, deadline, hosts))
            self._saved.pop(name, None)
            self._fleet.margins[name] = min(self._settings.migrate_margin_s, max(0.0, deadline - at) / 4)
            self._set_alarm(at)

    def listed(self, at: float) -> None:
        """Machines have become known: notices for them may have come before."""
        for host, deadline in list(self._unlisted.items()):
            over = at >= deadline + self._settings.deadlines.notice_s
            if over or host in self._fleet.hosts:
                del self._unlisted[host]
                if not over:
                    self.noticed(host, deadline, at)

    def recall(self, notices: Collection[Notice], used: Collection[SliceName], at: float) -> None:
        """What an earlier driver was told still counts, of machines that are there or that workers are on."""
        for notice in notices:
            if notice.slice in used or any(map(self._fleet.alive, notice.hosts)):
                self._fleet.notice(notice)
        self.alarm(at)

    def host_cancelled(self, host: HostId, at: float) -> bool:
        """The notice of this machine, and so of its slice, was taken back. False: there was none."""
        self._unlisted.pop(host, None)
        view = self._fleet.hosts.get(host)
        return view is not None and self._cancel(view.slice, at)

    def _cancel(self, name: SliceName, at: float) -> bool:
        if self._fleet.noticed.pop(name, None) is None:
            return False
        self._do(c.PreemptionSeen(at, name, None))
        self._set_alarm(at)
        return True

    # ------------------------------------------------------------------ what that means, and when

    def alarm(self, at: float) -> None:
        """Notices whose time is long over were not meant: the host lives."""
        for name, deadline in list(self._fleet.noticed.items()):
            if at >= deadline + self._settings.deadlines.notice_s:
                self._cancel(name, at)
        self._set_alarm(at)

    def _set_alarm(self, at: float) -> None:
        """For the next time at which a notice means something else than now."""
        moments = [
            moment
            for name, deadline in self._fleet.noticed.items()
            for moment in (
                self._last_save(name),
                deadline - self._fleet.margin(name),
                deadline + self._settings.deadlines.notice_s,
            )
            if moment > at
        ]
        if moments:
            self._do(c.SetTimer(TimerName.MIGRATE, 0, min(moments)))
        else:
            self._do(c.CancelTimer(TimerName.MIGRATE, 0))

    def saved(self, leaving: Collection[SliceName], at: float) -> None:
        """A checkpoint that was asked for was committed. Another one is wanted only shortly before the
        slice is left.
        """
        self._saved.update(dict.fromkeys(leaving, at))

    def want_save(self, name: SliceName, ready: bool, at: float) -> bool:
        """One at the notice, unless the last one comes soon; and the last one: once there is somewhere to go
        (``ready``), or there is no more time to wait for that.
        """
        last, saved, end = self._last_save(name), self._saved.get(name), self._fleet.noticed[name]
        if at < last:
            return saved is None and last - at > self._settings.migrate_margin_s
        late = at >= end - self._fleet.margin(name)
        return at < end and (ready or (late and (saved is None or saved < last)))

    def _last_save(self, name: SliceName) -> float:
        """From when on a last checkpoint is wanted: once it is there, the workers leave."""
        return self._fleet.noticed[name] - 2 * self._fleet.margin(name)

    def due(self, names: Collection[SliceName], margins: int, at: float) -> set[SliceName]:
        """Those of these slices that are left now, so many margins before they go. Once the deadline has
        passed, nobody leaves: the slice dies now, or it was never meant.
        """
        ends = {name: self._fleet.noticed[name] for name in names}
        return {n for n, end in ends.items() if end - margins * self._fleet.margin(n) <= at < end}
