"""What happened in a simulation, in order: what the brain heard, what it wanted, and what was done to the
world.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.control.commands import SetTimer
from everstep.control.placement import Assignment
from everstep.topology.slices import HostView


class Line(msgspec.Struct, frozen=True):
    at: float
    who: str
    """``world`` for faults, ``→`` for an event to the brain, ``←`` for a command of it."""
    what: object

    def __str__(self) -> str:
        return f"{self.at:10.3f} {self.who:>5} {brief(self.what)}"


class Story:
    def __init__(self) -> None:
        self.lines: list[Line] = []

    def tell(self, at: float, who: str, what: object) -> None:
        self.lines.append(Line(at, who, what))

    def text(self, last: int | None = None) -> str:
        shown = self.lines if last is None else self.lines[-last:]
        return "\n".join(map(str, shown)) + "\n"


def brief(what: object) -> str:
    """As ``repr``, without what goes without saying."""
    match what:
        case enum.Enum():
            return str(what.value)
        case float():
            return f"{what:.3f}"
        case HostView():
            return what.id + ("" if what.alive else " (lost)") + ("" if what.free else " (taken)")
        case Assignment():
            return f"{what.rank}@{what.host}"
        case msgspec.Struct():
            shown = [
                f"{field.name}={brief(getattr(what, field.name))}"
                for field in msgspec.structs.fields(what)
                if (field.name != "at" or isinstance(what, SetTimer))
                and getattr(what, field.name) != field.default
            ]
            return f"{type(what).__name__}({', '.join(shown)})"
        case tuple():
            return f"({', '.join(map(brief, what))})"
        case frozenset():
            return f"{{{', '.join(sorted(map(brief, what)))}}}"
        case _:
            return str(what)
