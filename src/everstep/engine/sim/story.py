"""What happened in a simulation, in order: what the brain was told, what it wanted, and what was done to
the world.
"""

from __future__ import annotations

import msgspec


class Line(msgspec.Struct, frozen=True):
    at: float
    who: str
    """``world`` for faults, ``→`` for an event to the brain, ``←`` for a command of it."""
    what: object

    def __str__(self) -> str:
        return f"{self.at:10.3f} {self.who:>5} {self.what}"


class Story:
    def __init__(self) -> None:
        self.lines: list[Line] = []

    def tell(self, at: float, who: str, what: object) -> None:
        self.lines.append(Line(at, who, what))

    def text(self, last: int | None = None) -> str:
        shown = self.lines if last is None else self.lines[-last:]
        return "\n".join(map(str, shown)) + "\n"
