"""Who has stopped making progress, and who is to blame.

Ranks of a group wait for each other, so that one that hangs makes all of them stand still. A rank that is
overdue leads to a closer look at every rank; what that finds is judged here. Being slow is not a hang, and
neither is doing nothing for a while. What proves a hang is that a rank is stuck *and* its peers are ahead of
it, or wait for it; without peers that say so, only a time that nothing explains does.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

from everstep.deadlines import Deadlines
from everstep.health.vitals import Finding, ProcessState, StackPlace, Stage, Vitals

_MARGIN = 1.25
"""A thing is late only beyond this many times the longest that it has taken so far."""
_FAR = 10.0
"""Standing still for this many times the longest step is a hang by itself, whatever the peers do."""
_WAITS = (StackPlace.COLLECTIVE, StackPlace.REPORT)
"""Where a rank waits for others."""


class OnHang(enum.StrEnum):
    """What happens to workers that hang."""

    RESTART = "restart"
    WARN = "warn"
    FAIL = "fail"


class HangVerdict(msgspec.Struct, frozen=True):
    culprits: tuple[int, ...]
    why: str
    """Of the first of them."""


def is_overdue(vitals: Vitals, limits: Deadlines) -> bool:
    """Whether this rank has been without progress for so long that its peers are to be examined."""
    quiet, still = vitals.quiet_s, vitals.still_s
    if vitals.state is ProcessState.TRACED:
        return False
    match vitals.stage:
        case Stage.START | Stage.RETURNED:
            return False  # the start has a deadline of its own, and a rank that has returned is done
        case Stage.PAUSE:
            return quiet >= (vitals.allowed_s or limits.hang_pause_s)
        case Stage.FIRST_STEP:
            return max(still, vitals.device_s) >= limits.hang_first_s
        case Stage.RESTORE:
            return still >= limits.hang_restore_s
        case Stage.CHECKPOINT:
            return still >= max(limits.hang_checkpoint_s, _MARGIN * vitals.usual_s)
        case Stage.TRAINING:
            late = quiet >= vitals.usual_s + min(0.25 * vitals.usual_s, limits.hang_s / 2) + limits.hang_s / 4
            dead = still >= max(limits.hang_s, _MARGIN * vitals.lull_s) or _is_kept(vitals, limits)
            return (late and dead) or _is_inexplicable(vitals, limits)


def _is_kept(vitals: Vitals, limits: Deadlines) -> bool:
    """Whether a C call keeps Python's lock, or a GPU doesn't finish what it was given. Both can look busy."""
    return max(vitals.held_s, vitals.device_s) >= limits.hang_s


def _is_inexplicable(vitals: Vitals, limits: Deadlines) -> bool:
    """Whether nothing that it may be doing takes so long, whatever its peers do."""
    if vitals.stage is not Stage.TRAINING or vitals.state is ProcessState.STOPPED:
        return True  # these stages have deadlines of their own
    still = max(vitals.still_s, vitals.device_s)
    idle = still >= limits.hang_idle_s and vitals.quiet_s >= _FAR * vitals.usual_s
    return idle or _is_busy_for_too_long(vitals, limits)


def _is_busy_for_too_long(vitals: Vitals, limits: Deadlines) -> bool:
    return vitals.quiet_s >= limits.hang_busy_s + _MARGIN * vitals.usual_s


def _may_wait_on_gpu(vitals: Vitals, limits: Deadlines) -> bool:
    """Whether its GPU doesn't finish something that may be a collective: then it waits for a rank that has
    not begun it.
    """
    if vitals.stage is Stage.TRAINING and _is_busy_for_too_long(vitals, limits):
        return False  # for so long, nobody waits
    return vitals.stage in (Stage.TRAINING, Stage.FIRST_STEP) and vitals.device_s >= limits.hang_s


def judge(
    found: Sequence[Finding], limits: Deadlines, others: Sequence[Finding] | None = None
) -> HangVerdict | None:
    """Which ranks of a group hang, so that the others wait for them. None: no rank is proven to; the group
    may wait for a rank that is at work, or for one of ``others``, the ranks of the other replica groups.
    """
    overdue = [one for one in found if is_overdue(one.vitals, limits)]
    hung = [one for one in overdue if _is_proven(one, found, others or (), limits)]
    if not overdue:
        return None
    for is_culprit in (_is_stopped, lambda one: one.vitals.held_s >= limits.hang_s):
        if culprits := [one for one in hung if is_culprit(one)]:
            return _verdict(culprits)
    returned = {one.vitals.rank for one in found if one.vitals.stage is Stage.RETURNED}
    behind = _behind(found, overdue)
    if behind:
        # Others wait for those that are behind. If one of them may be at work, there is nothing to blame.
        settled = {one.vitals.rank for one in hung} | returned
        if not all(one.vitals.rank in settled for one in behind):
            return None
        return _verdict([one for one in behind if not _may_wait_on_gpu(one.vitals, limits)] or behind)
    late = {one.vitals.rank for one in overdue}
    return _stuck_by_itself(hung, found, others or (), late | returned, limits) or _all_waiting(
        overdue, found, limits, alone=others is None
    )


def _is_stopped(one: Finding) -> bool:
    return one.vitals.state is ProcessState.STOPPED


def _is_proven(one: Finding, found: Sequence[Finding], others: Sequence[Finding], limits: Deadlines) -> bool:
    """Whether a rank that is overdue hangs, if it isn't merely a victim."""
    if _is_inexplicable(one.vitals, limits):
        return True
    # A loop that checks every second whether it may go on is the user's own, and may wait on purpose. A
    # library that waits, such as a data loader, waits for data that should be there.
    waits = one.place not in (StackPlace.WORKING, StackPlace.UNKNOWN)
    stuck = waits or _is_kept(one.vitals, limits) or one.vitals.asleep_s >= limits.hang_s
    return stuck and (
        any(_is_ahead(peer, one) for peer in found) or any(_gets_on(peer, limits) for peer in others)
    )


def _is_ahead(peer: Finding, one: Finding) -> bool:
    """Whether the peer is ahead of this one, or waits for it."""
    ahead = peer.vitals.reports > one.vitals.reports or peer.vitals.collectives > one.vitals.collectives
    return ahead or (peer.place in _WAITS and one.place not in _WAITS)


def _gets_on(other: Finding, limits: Deadlines) -> bool:
    """Whether a rank of another group trains, or waits. Its counts can't be compared: groups begin at
    different times.
    """
    return other.place in _WAITS or (
        other.vitals.stage is Stage.TRAINING and other.vitals.quiet_s <= limits.hang_s / 2
    )


def _behind(found: Sequence[Finding], overdue: Sequence[Finding]) -> list[Finding]:
    """Those that others wait for, by what is counted: reports where one waits for those, else
    collectives.
    """
    most = max((one.vitals.reports for one in overdue if one.place is StackPlace.REPORT), default=0)
    if late := [one for one in found if one.vitals.reports < most]:
        return late
    fewest = min(one.vitals.collectives for one in found)
    if any(one.vitals.collectives > fewest for one in found):
        return [one for one in found if one.vitals.collectives == fewest]
    return []


def _stuck_by_itself(
    hung: Sequence[Finding],
    found: Sequence[Finding],
    others: Sequence[Finding],
    settled: set[int],
    limits: Deadlines,
) -> HangVerdict | None:
    """Those whose stack says that they don't wait for another rank."""
    on_gpu = [one for one in hung if one.place not in _WAITS and _may_wait_on_gpu(one.vitals, limits)]
    alone = [one for one in hung if one not in on_gpu]
    if stuck := [one for one in alone if one.place in (StackPlace.WORKING, StackPlace.UNKNOWN)]:
        return _verdict(stuck)
    waiting = [one for one in alone if one.place is StackPlace.WAITING]
    unsettled = [one for one in found if one.vitals.rank not in settled]
    # It may wait for one of these; not if they get on without it.
    if waiting and all(one.vitals.quiet_s <= one.vitals.usual_s for one in unsettled):
        return _verdict(waiting)
    # Likewise what a GPU waits for. A rank that only gets on may have yet to begin it.
    here = all(one in on_gpu or one.place in _WAITS or one.vitals.stage is Stage.RETURNED for one in found)
    if on_gpu and here and all(_gets_on(one, limits) or _is_late_on_gpu(one, limits) for one in others):
        return _verdict(on_gpu)
    return None


def _is_late_on_gpu(one: Finding, limits: Deadlines) -> bool:
    return is_overdue(one.vitals, limits) and _may_wait_on_gpu(one.vitals, limits)


def _all_waiting(
    overdue: Sequence[Finding], found: Sequence[Finding], limits: Deadlines, *, alone: bool
) -> HangVerdict | None:
    """Everybody waits for another rank: for one that has returned, or else for each other."""
    returned = [one for one in found if one.vitals.stage is Stage.RETURNED]
    if len(overdue) + len(returned) < len(found) or not all(one.place in _WAITS for one in overdue):
        return None  # somebody is at work
    if returned:
        return _verdict(returned)
    by_stack = grouped(overdue)
    # In one collective, they may wait for a slow network. In two different ones, they wait for each other.
    may_go_on = len(by_stack) == 1 and not all(_is_inexplicable(one.vitals, limits) for one in overdue)
    if may_go_on or not alone:
        return None
    rarest = by_stack[0]
    return HangVerdict(
        tuple(one.vitals.rank for one in rarest), f"{_no_progress(rarest[0])}: every rank waits"
    )


def _verdict(culprits: Sequence[Finding]) -> HangVerdict:
    return HangVerdict(tuple(one.vitals.rank for one in culprits), _why(culprits[0]))


def _why(one: Finding) -> str:
    vitals = one.vitals
    at = f", at {one.line}" if one.line else ""
    if vitals.stage is Stage.RETURNED:
        times = f"{vitals.reports} report{'' if vitals.reports == 1 else 's'}"
        return f"returned from the training function after {times}, and other ranks wait for it"
    if vitals.state is ProcessState.STOPPED:
        return f"{_no_progress(one)}: its process is stopped (SIGSTOP){at}"
    if vitals.held_s > vitals.quiet_s / 2:
        return f"{_no_progress(one)}: a C call has kept Python's lock for {vitals.held_s:.0f} s{at}"
    if vitals.device_s > vitals.quiet_s / 2:
        return (
            f"{_no_progress(one)}: its GPU has not finished what it was given {vitals.device_s:.0f} s ago{at}"
        )
    if vitals.state is ProcessState.BLOCKED:
        return f"{_no_progress(one)}: it is blocked in the kernel, which a disk or a network file can do{at}"
    return f"{_no_progress(one)}{at}"


def _no_progress(one: Finding) -> str:
    vitals = one.vitals
    stage = "" if vitals.stage is Stage.TRAINING else f" in {vitals.label or vitals.stage.value}"
    known = vitals.step_s and vitals.stage is Stage.TRAINING
    usual = f" (a step usually takes {_seconds(vitals.step_s)})" if known else ""
    return f"no progress for {vitals.quiet_s:.0f} s{stage}{usual}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


def grouped(found: Iterable[Finding]) -> list[list[Finding]]:
    """By equal stacks, the rarest first."""
    groups: dict[str, list[Finding]] = {}
    for one in sorted(found, key=lambda one: one.vitals.rank):
        groups.setdefault(one.stack or f"{one.vitals.state} {one.vitals.stage}", []).append(one)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].vitals.rank))
