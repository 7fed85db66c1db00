"""Moving workers that could train on: growing, leaving slices that will be taken away, changing to new code.

The first two take the new place before they give up the old one. If that fails, training was never disturbed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from everstep.control import commands as c, ending, events as e, recovery, starting
from everstep.control.fleet import NoticedSlice
from everstep.control.run import Run, used_by_other_groups
from everstep.control.table import Phase
from everstep.failures import Failure, Kind
from everstep.topology.slices import HostId, SliceName

NEW_CODE = "the training function or its config changed"


class Refuge(NamedTuple):
    """Which groups would leave, and for which slices: for none, if they would have to wait."""

    groups: set[int]
    slices: frozenset[SliceName]


def reconsider(run: Run) -> None:
    """Look at what is: is there a better place, can it be had, and should workers save because of it?"""
    moving = run.moving
    moving.due.pop(e.TimerName.GROW, None)
    if run.over:
        return
    if run.phase is not Phase.RUNNING:
        run.ask_to_save(c.AskReason.NONE)
    elif e.TimerName.LAST_CHECKPOINT in moving.due:
        run.ask_to_save(c.AskReason.STOP)
    elif moving.outdated and e.TimerName.BOUNDARY not in moving.due:
        recovery.restart_all(run, NEW_CODE)  # no checkpoint was committed at which they could have changed
    elif names := _leaving(run):
        _leave(run, names)
    elif moving.outdated:
        if moving.standbys:
            drop(run)
        run.ask_to_save(c.AskReason.NEW_CODE)
    else:
        run.ask_to_save(c.AskReason.RESIZE if not run.restarts and _can_grow(run) else c.AskReason.NONE)


def postpone_growth(run: Run) -> None:
    """Workers have just started: the run doesn't grow for a while."""
    run.moving.grow_from = max(run.moving.grow_from, run.now + run.settings.resize_interval_s)


def checkpoint_committed(run: Run, held: bool) -> None:
    """A checkpoint was committed. ``held``: workers can change over at it without losing a step."""
    if e.TimerName.LAST_CHECKPOINT in run.moving.due:
        ending.stop_now(run)
        return
    if run.moving.asked is c.AskReason.PREEMPTION:
        for name in _leaving(run):
            run.fleet.noticed[name].saved = run.now
    if held and run.phase is Phase.RUNNING and not run.restarts:
        if run.moving.outdated:
            recovery.restart_all(run, NEW_CODE)
        elif run.moving.asked is c.AskReason.RESIZE:
            larger = _larger(run)
            if larger is not None and larger <= run.fleet.held:
                recovery.restart_all(run, "resize")
            else:
                drop(run)


# ---------------------------------------------------------------------- the new place


def _reserve_standby(run: Run, slices: Collection[SliceName], not_before: float) -> None:
    wanted = frozenset(slices) - run.fleet.held - run.moving.slices
    if wanted and run.now < not_before:
        run.moving.due[e.TimerName.GROW] = not_before
    elif wanted:
        taken = run.reserve(wanted)
        run.moving.standbys[taken.key] = taken


def _is_ready(run: Run) -> bool:
    """Nothing of what is taken is missing any more."""
    taken, fleet = run.moving.standbys.values(), run.fleet
    return all(one.slices <= fleet.held and one.hosts <= fleet.prepared for one in taken)


def host_failed(run: Run, host: HostId) -> None:
    if concerned := [key for key, standby in run.moving.standbys.items() if host in standby.hosts]:
        drop(run, concerned)


def drop(run: Run, reservations: Collection[int] | None = None) -> None:
    """Give up these standbys, or all of them. Another try comes after a pause."""
    moving, limits = run.moving, run.settings.deadlines
    moving.refuge_from = run.now + max(limits.backoff_first_s, moving.backoff.next_pause(run.now))
    moving.grow_from = run.now + run.settings.resize_interval_s
    if moving.asked is c.AskReason.RESIZE:
        run.ask_to_save(c.AskReason.NONE)
    for reservation in list(moving.standbys if reservations is None else reservations):
        standby = moving.standbys.pop(reservation)
        run.withdraw(reservation)
        run.release(standby.slices)


# ---------------------------------------------------------------------- growing


def _can_grow(run: Run) -> bool:
    """Whether a larger place is ready; if it can be had, it is taken."""
    moving, larger = run.moving, _larger(run)
    if larger is None:
        if moving.standbys or moving.asked is c.AskReason.RESIZE:
            drop(run)
        return False
    if moving.standbys:
        return _is_ready(run)
    if not larger <= run.fleet.held:
        _reserve_standby(run, larger, moving.grow_from)
        return False
    if run.now < moving.grow_from:
        moving.due[e.TimerName.GROW] = moving.grow_from
        return False
    return True  # the slices that we hold have room for more


def _larger(run: Run) -> frozenset[SliceName] | None:
    current = sum(len(group.ranks) for group in run.groups.values())
    if current >= run.settings.workers_max:
        return None
    found = run.fleet.place_all(run.now)
    return found.slice_names if found is not None and found.world_size > current else None


# ---------------------------------------------------------------------- leaving


def _leaving(run: Run) -> set[SliceName]:
    """Slices that workers train in and that will be taken away."""
    if not run.fleet.noticed:
        return set()
    live = run.fleet.noticed.keys() & {h.slice for h in run.fleet.hosts.values() if h.alive}
    return {name for name in live if any(group.trains_in(name) for group in run.groups.values())}


def _leave(run: Run, names: set[SliceName]) -> None:
    """Take a refuge, ask for the checkpoints before, and go in time."""
    fleet, refuge = run.fleet, _refuge(run, names)
    place = refuge.slices if refuge is not None else frozenset()
    _reserve_standby(run, place, run.moving.refuge_from)
    is_ready = bool(place) and place <= fleet.held and _is_ready(run)
    wanted = any(_wants_save(run, fleet.noticed[name], is_ready) for name in names)
    run.ask_to_save(c.AskReason.PREEMPTION if wanted else c.AskReason.NONE)
    going = _going_now(run, names, refuge) if refuge is not None else set()
    if going:
        host = min(view.id for view in fleet.hosts.values() if view.slice in names)
        message = f"slice {', '.join(sorted(names))} is being taken away"
        recovery.failed(run, Failure(Kind.PREEMPTED, run.now, message, host=host), going)


def _going_now(run: Run, names: set[SliceName], refuge: Refuge) -> set[int]:
    """The groups that move now, because their slice will be gone soon and a place for them is kept.

    They leave late, not at once: notices that follow each other then lead to one restart. With the last
    checkpoint just committed no step is lost by that, so it is not waited any longer. Once the deadline has
    passed, nobody leaves: the slice dies now, or it was never meant.
    """
    noticed = {name: run.fleet.noticed[name] for name in names if run.now < run.fleet.noticed[name].deadline}
    late = {name for name, one in noticed.items() if one.leave_at <= run.now}
    just_saved = any(run.fleet.noticed[name].saved == run.now for name in names)
    soon = just_saved and any(one.last_save <= run.now for one in noticed.values())
    if not (late or soon) or not _is_ready(run) or not refuge.slices <= run.fleet.held:
        return set()  # train on for as long as it lasts
    if refuge.slices:
        return refuge.groups
    # They wait for a place: those whose time is up, and that share their slice with nobody who stays.
    alone = late - used_by_other_groups(run, refuge.groups)
    return {g for g in refuge.groups if run.groups[g].slices() & alone}


def _refuge(run: Run, names: set[SliceName]) -> Refuge | None:
    restarting, groups = run.restarting, run.groups
    going = {g.number for g in groups.values() if g.slices() & names and not g.finished} - restarting
    if not going:
        return None
    others = [g for g in groups.values() if g.number not in going]
    stay = any(not g.finished for g in others if g.number not in restarting)
    if run.settings.group_size is not None and stay:
        # Groups that are being replaced go back to where they were, as far as that is still there.
        places = starting.assign_again(run, going, used_by_other_groups(run, going))
        slices = frozenset(a.slice for a in places)
        if places and not slices & names:
            return Refuge(going, slices)
        # Nowhere to go. They leave nevertheless, if enough stay: a rank that is killed in the middle of a
        # step costs the others that step.
        enough = len(groups) - len(going | restarting) >= run.settings.groups_min
        return Refuge(going, frozenset()) if enough else None
    if restarting:
        return None  # they come first
    placement = run.fleet.place_all(run.now, staying_only=True)
    return Refuge(going, placement.slice_names) if placement is not None else None


# ---------------------------------------------------------------------- notices


def noticed(run: Run, event: e.PreemptionNotice) -> None:
    """One host of a slice noticed means the whole slice; the earliest deadline counts."""
    host, deadline = event.host, event.deadline
    fleet, view = run.fleet, run.fleet.hosts.get(host)
    if view is None:  # the notice came before the list that has its machine
        fleet.unlisted[host] = event
        return
    before = fleet.noticed.get(view.slice)
    known = before.deadline if before is not None and before.confirmed and host in before.hosts else None
    # An expired notice doesn't hide a new one.
    if view.alive and (known is None or deadline < known or known <= run.now < deadline):
        notice = e.Notice(view.slice, deadline, fleet.machines(view.slice))
        fleet.notice(notice, min(run.settings.migrate_margin_s, max(0.0, deadline - run.now) / 4), True)
        run.do(c.PreemptionSeen(run.now, notice.slice, deadline, notice.hosts))


def match_notices(run: Run) -> None:
    """Take in the notices that came before the list with their machines."""
    for host, event in list(run.fleet.unlisted.items()):
        over = run.now >= event.deadline + run.settings.deadlines.notice_s
        if over or host in run.fleet.hosts:
            del run.fleet.unlisted[host]
            if not over:
                noticed(run, event)


def restore_notices(run: Run, notices: Collection[e.Notice], used: Collection[HostId]) -> None:
    """Notices to an earlier driver still count, for machines that are there or that workers are on."""
    for notice in (one for one in notices if one.slice not in run.fleet.noticed):
        if any(host in used or run.fleet.alive(host) for host in notice.hosts):
            run.fleet.notice(notice, run.settings.migrate_margin_s, False)
    review_notices(run)


def cancelled(run: Run, event: e.NoticeCancelled) -> None:
    """The notice of this machine, and so of its slice, was taken back."""
    run.fleet.unlisted.pop(event.host, None)
    view = run.fleet.hosts.get(event.host)
    if view is not None and view.slice in run.fleet.noticed:
        _cancel(run, view.slice)
        starting.retry_places(run)


def _cancel(run: Run, name: SliceName) -> None:
    del run.fleet.noticed[name]
    run.do(c.PreemptionSeen(run.now, name, None))


def review_notices(run: Run) -> None:
    """A moment of a notice has come: to save, or to leave. One whose deadline is long over was a false alarm,
    since the host lives.
    """
    for name, noticed in list(run.fleet.noticed.items()):
        if run.now >= noticed.deadline + run.settings.deadlines.notice_s:
            _cancel(run, name)
    starting.retry_places(run)


def set_notice_timer(run: Run) -> None:
    """For the next moment of a notice: to save, to leave, or to drop it."""
    after, notices = run.settings.deadlines.notice_s, run.fleet.noticed.values()
    moments = [moment for n in notices for moment in (n.last_save, n.leave_at, n.deadline + after)]
    before = run.moving.due.pop(e.TimerName.MIGRATE, run.now + 1)
    if before <= run.now:  # it is about to fire, and has not been handled yet
        run.moving.due[e.TimerName.MIGRATE] = before
    elif later := [moment for moment in moments if moment > run.now]:
        run.moving.due[e.TimerName.MIGRATE] = min(later)


def _wants_save(run: Run, noticed: NoticedSlice, is_ready: bool) -> bool:
    """Whether workers should save because of this notice. Twice: once when it comes, unless the last save is
    soon anyway; and a last time, once there is a place to go to, or no more time to wait for one.
    """
    now, last, saved = run.now, noticed.last_save, noticed.saved
    if now < last:
        return saved is None and last - now > run.settings.migrate_margin_s
    late = now >= noticed.leave_at and (saved is None or saved < last)
    return now < noticed.deadline and (is_ready or late)
