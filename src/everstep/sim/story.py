"""What happened in a simulation, in order: events and commands of controllers, lines that drivers printed,
and what was done to the cluster and the store.
"""

from __future__ import annotations

import enum
from dataclasses import fields

import msgspec

from everstep.control.commands import CancelTimer, SetTimer
from everstep.deadlines import Deadlines
from everstep.saved.reports import Part
from everstep.sim.scenario import TimedFault
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostView


class StoryLine(msgspec.Struct, frozen=True):
    at: float
    who: str
    """``world`` for faults, a driver for what it prints, and with ``→`` and ``←`` for the events to its
    controller and the commands that it answers with.
    """
    what: object

    def __str__(self) -> str:
        return f"{self.at:10.3f} {self.who:>10} {brief(self.what)}"


class Story:
    def __init__(self) -> None:
        self.lines: list[StoryLine] = []

    def add(self, at: float, who: str, what: object) -> None:
        self.lines.append(StoryLine(at, who, what))

    def text(self) -> str:
        """For a person: timers that don't fire any more are left out."""
        return "".join(f"{line}\n" for line in self.lines if not isinstance(line.what, CancelTimer))


def brief(what: object) -> str:
    """As ``repr``, without what goes without saying."""
    match what:
        case enum.Enum():
            return str(what.value)
        case float():
            return f"{what:.3f}"
        case HostView():
            return what.id + ("" if what.alive else " (lost)") + ("" if what.free else " (taken)")
        case Part():
            return f"part {what.index} of {what.folder}{', held' if what.held else ''}"
        case Assignment():
            return f"{what.rank}@{what.host}"
        case msgspec.Struct():
            shown = [
                f"{field.name}={brief(getattr(what, field.name))}"
                for field in msgspec.structs.fields(what)
                if (field.name != "at" or isinstance(what, SetTimer | TimedFault))
                and getattr(what, field.name) != field.default
            ]
            return f"{type(what).__name__}({', '.join(shown)})"
        case Deadlines():
            usual = Deadlines()
            changed = {f.name: getattr(what, f.name) for f in fields(what)}
            shown = [f"{k}={brief(v)}" for k, v in changed.items() if v != getattr(usual, k)]
            return f"Deadlines({', '.join(shown)})"
        case tuple():
            return f"({', '.join(map(brief, what))})"
        case frozenset():
            return f"{{{', '.join(sorted(map(brief, what)))}}}"
        case _:
            return str(what)
