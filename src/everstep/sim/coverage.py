"""Which fault leads to which recovery step: a table, and the docs' page of it.

A test runs schedules with one kind of fault each until every step that it often leads to has been reached,
and fails if one is reached that isn't in the table.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from everstep.control.commands import Rung
from everstep.sim.scenario import FaultKind, draw
from everstep.sim.schedule import Schedule

LEAST, MOST = 20, 300
"""How many schedules are tried for each kind of fault."""

COLUMNS = {
    Rung.REPLACE_GROUPS: "replace groups",
    Rung.RESTART_IN_PLACE: "in place",
    Rung.REPLACE_HOSTS: "replace hosts",
    Rung.SHRINK: "shrink",
    Rung.WAIT: "wait",
    Rung.FAIL: "fail",
    Rung.PLANNED: "grow back",
}

_GROUPS, _IN_PLACE, _HOSTS, _SHRINK, _WAIT, _FAIL, _GROW = COLUMNS


class FaultRow(msgspec.Struct, frozen=True):
    """Of one kind of fault, alone."""

    often: frozenset[Rung]
    """The steps that it leads to in some of a few schedules."""
    seldom: frozenset[Rung]
    """Those that it can lead to, which takes hundreds of schedules or thousands."""
    why_not_the_others: str


def _row(often: Iterable[Rung], why_not_the_others: str, seldom: Iterable[Rung] = ()) -> FaultRow:
    return FaultRow(frozenset(often), frozenset(seldom), why_not_the_others)


_LATE = "training goes on; but a start may come too late, again and again"

REACHES: dict[FaultKind, FaultRow] = {
    FaultKind.CRASH: _row(
        (_GROUPS, _IN_PLACE, _HOSTS, _FAIL),
        "the hosts are fine, so capacity is never short; one that keeps failing is set aside",
    ),
    FaultKind.TEMPLATE: _row((_GROUPS, _IN_PLACE, _HOSTS, _FAIL), "the same"),
    FaultKind.LOSS: _row(
        (_GROUPS, _HOSTS, _SHRINK, _WAIT, _FAIL),
        "a host is gone, so the restart is never on the same hosts",
        seldom=(_GROW,),
    ),
    FaultKind.RACK: _row((_GROUPS, _HOSTS, _SHRINK, _WAIT, _FAIL), "the same", seldom=(_GROW,)),
    FaultKind.FREEZE: _row(
        (_GROUPS, _IN_PLACE, _HOSTS, _SHRINK, _WAIT, _FAIL),
        "in place: it thaws in time, and its peers had given up",
        seldom=(_GROW,),
    ),
    FaultKind.STUCK: _row(
        (_GROUPS, _IN_PLACE, _HOSTS, _SHRINK, _WAIT, _FAIL),
        "in place: the workers go in time",
        seldom=(_GROW,),
    ),
    FaultKind.START: _row(
        (_FAIL,), "alone it only delays the first start; after other faults it meets every step"
    ),
    FaultKind.RESERVE: _row(
        (_FAIL,),
        "the same; wait: what the engine is still giving back; groups, grow: a first start that was smaller",
        seldom=(_GROUPS, _WAIT, _GROW),
    ),
    FaultKind.PREEMPT: _row(
        (_GROUPS, _HOSTS, _SHRINK, _WAIT, _FAIL),
        "in place: workers that were killed first, and no other place",
        seldom=(_IN_PLACE, _GROW),
    ),
    FaultKind.NOTICE: _row((_GROUPS, _HOSTS, _WAIT, _FAIL), "the same", seldom=(_IN_PLACE, _SHRINK, _GROW)),
    FaultKind.FLAP: _row(
        (_GROUPS, _HOSTS, _WAIT, _FAIL),
        "a slice is gone, so never on the same hosts",
        seldom=(_SHRINK, _GROW),
    ),
    FaultKind.STORAGE: _row(
        (),
        f"{_LATE}; what is damaged is found by a restart for another cause",
        seldom=(_FAIL,),
    ),
    FaultKind.CUT: _row((_FAIL,), _LATE),
    FaultKind.DISK: _row((_FAIL,), _LATE),
    FaultKind.JOURNAL: _row(
        (_WAIT,),
        "training goes on; wait: nothing is left of it, and hosts stay with the run that had it for a while",
        seldom=(_GROUPS,),
    ),
    FaultKind.LISTING: _row((), "nothing is decided by a list alone"),
    FaultKind.DRIVER: _row(
        (_GROW,),
        "workers are adopted, or start afresh once the old slices are free: neither is a recovery",
        seldom=(_GROUPS, _WAIT),
    ),
    FaultKind.POWER: _row(
        (_GROUPS, _WAIT),
        "the driver is gone as well: the next one starts afresh on what is back by then",
        seldom=(_GROW,),
    ),
    FaultKind.DUPLICATE: _row((), "what is stale is refused"),
    FaultKind.CLOCK: _row((), "time in which the driver didn't run is nobody's silence"),
    FaultKind.STOP: _row((), "the run ends as the user wants"),
    FaultKind.HANG: _row(
        (_GROUPS, _IN_PLACE, _FAIL), "the hosts are fine, and a hang says nothing about one"
    ),
    FaultKind.RETURN: _row(
        (_GROUPS, _HOSTS, _SHRINK, _WAIT, _FAIL),
        "in place: the host is back, and there is no other place",
        seldom=(_IN_PLACE, _GROW),
    ),
}


def reached(fault: FaultKind) -> frozenset[Rung]:
    """The steps that schedules with this kind of fault reach; until those that it often leads to are."""
    found: set[Rung] = set()
    for seed in range(MOST):
        if seed >= LEAST and found >= REACHES[fault].often:
            break
        schedule = Schedule(draw(seed, fault))
        schedule.run()
        found |= schedule.facts.rungs.keys() & COLUMNS.keys()
    return frozenset(found)


def page() -> str:
    """The docs' page."""
    head = " | ".join(COLUMNS.values())
    rows = "".join(
        f"| {fault.value} | "
        + " | ".join("●" if rung in row.often else "○" if rung in row.seldom else "" for rung in COLUMNS)
        + f" | {row.why_not_the_others} |\n"
        for fault, row in REACHES.items()
    )
    return f"""# Which fault leads where

<!-- Made by: python -m everstep.sim.coverage > docs/fault-coverage.md -->

Each row is a kind of fault that the [simulator](simulator.md) injects, alone; each column a step of the
recovery ladder, and `grow back`, the resize that follows a shrink. ●: some of the first {MOST} schedules lead
there; a test reaches every one, and fails if another is reached. ○: it takes hundreds of schedules or
thousands. Neither: this fault alone can't lead there, and the last column says why. Mixed, as most schedules
are, they lead everywhere.

| fault | {head} | why not the others |
| --- |{" :---: |" * len(COLUMNS)} --- |
{rows}"""


if __name__ == "__main__":
    print(page(), end="")
