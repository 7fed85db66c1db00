"""How messages name and count things: "rank 1", "ranks 1, 2", "3 steps"."""

from __future__ import annotations

from collections.abc import Collection


def named(what: str, which: Collection[object]) -> str:
    """``rank 1``, or ``ranks 1, 2``, in the order in which they are given."""
    return f"{what if len(which) == 1 else f'{what}s'} {', '.join(map(str, which))}"


def count(number: int, what: str) -> str:
    """``1 step``, or ``2 steps``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def verb(subjects: Collection[object], one: str, several: str) -> str:
    """``is`` or ``are``, ``has`` or ``have``."""
    return one if len(subjects) == 1 else several
