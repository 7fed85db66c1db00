"""Which fault leads to which rung of the ladder: a table, and the docs' page of it.

A test runs schedules with one kind of fault each until every cell of the table has been reached, and fails
if one is reached that isn't in it.
"""

from __future__ import annotations

from everstep.control.commands import Rung
from everstep.sim.brain.run import run_scenario
from everstep.sim.brain.scenario import Family, draw

COLUMNS = {
    Rung.REPLACE_GROUPS: "replace groups",
    Rung.RESTART_IN_PLACE: "in place",
    Rung.REPLACE_HOSTS: "replace hosts",
    Rung.SHRINK: "shrink",
    Rung.WAIT: "wait",
    Rung.FAIL: "fail",
    Rung.RESIZE: "grow back",
}

_GROUPS, _IN_PLACE, _HOSTS, _SHRINK, _WAIT, _FAIL, _GROW = COLUMNS

REACHES: dict[Family, tuple[frozenset[Rung], str]] = {
    Family.CRASH: (
        frozenset({_GROUPS, _IN_PLACE, _HOSTS, _FAIL}),
        "the hosts are fine, so capacity is never short; one that keeps failing is set aside",
    ),
    Family.TEMPLATE: (frozenset({_GROUPS, _IN_PLACE, _HOSTS, _FAIL}), "the same"),
    Family.LOSS: (
        frozenset(COLUMNS) - {_IN_PLACE},
        "a host is gone, so the restart is never on the same hosts",
    ),
    Family.RACK: (frozenset(COLUMNS) - {_IN_PLACE}, "the same"),
    Family.FREEZE: (frozenset(COLUMNS), "in place: it thaws in time, and its peers had given up"),
    Family.STUCK: (frozenset(COLUMNS), "in place: the workers go in time"),
    Family.START: (
        frozenset({_FAIL}),
        "alone it only delays the first start; after other faults it meets every rung",
    ),
    Family.RESERVE: (
        frozenset({_GROUPS, _WAIT, _FAIL, _GROW}),
        "the same; wait: what the engine is still giving back; groups, grow: a first start that was smaller",
    ),
    Family.PREEMPT: (frozenset(COLUMNS), "in place: workers that were killed first, and no other place"),
    Family.NOTICE: (frozenset(COLUMNS), "the same"),
    Family.FLAP: (frozenset(COLUMNS) - {_IN_PLACE}, "a slice is gone, so never on the same hosts"),
    Family.STORAGE: (
        frozenset(),
        "training goes on; what is damaged is found by a restart for another cause",
    ),
    Family.DRIVER: (
        frozenset({_GROUPS, _WAIT, _GROW}),
        "workers are adopted, or start afresh once the old slices are free: neither is a recovery",
    ),
    Family.DUPLICATE: (frozenset(), "what is stale is refused"),
    Family.CLOCK: (frozenset(), "time in which the driver didn't run is nobody's silence"),
    Family.STOP: (frozenset(), "the run ends as the user wants"),
    Family.HANG: (
        frozenset({_GROUPS, _IN_PLACE, _FAIL}),
        "the hosts are fine, and a hang says nothing about one",
    ),
}
"""The rungs that schedules with this kind of fault alone reach, and why not the others."""


def reached(family: Family, first: int, most: int) -> frozenset[Rung]:
    """The rungs that schedules with this kind of fault reach; until all are, or one that isn't listed."""
    found: set[Rung] = set()
    for seed in range(first, first + most):
        found |= run_scenario(draw(seed, family)).rungs.keys() & COLUMNS.keys()
        if (found >= REACHES[family][0] and REACHES[family][0]) or found - REACHES[family][0]:
            break
    return frozenset(found)


def page() -> str:
    """The docs' page."""
    head = " | ".join(COLUMNS.values())
    rows = "".join(
        f"| {family.value} | "
        + " | ".join("●" if rung in rungs else "" for rung in COLUMNS)
        + f" | {why} |\n"
        for family, (rungs, why) in REACHES.items()
    )
    return f"""# Which fault leads where

<!-- Made by: python -m everstep.sim.brain.coverage > docs/fault-coverage.md -->

Each row is a kind of fault that the [simulator](simulator.md) injects, alone; each column a rung of the
recovery ladder, and `grow back`, the resize that follows a shrink. A dot: some schedule reached it (a test
reaches every one, and fails if another is reached). No dot: this fault alone can't reach it, and the last
column says why. Mixed, as most schedules are, they meet everywhere.

| fault | {head} | why not the others |
| --- |{" :---: |" * len(COLUMNS)} --- |
{rows}"""


if __name__ == "__main__":
    print(page(), end="")
