"""Mistakes that can be put into the production code while a schedule runs, to show that they are found.

Production never imports this module, nor those with the mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from everstep.sim.scenario import FaultKind, Scenario


def _always(scenario: Scenario) -> bool:
    return True


class Mistake(msgspec.Struct, frozen=True):
    name: str
    mistake: str
    where: tuple[object, ...]
    """The classes, modules or tables in which the attribute is replaced."""
    attribute: str | type
    wrong: object
    """What takes its place."""
    shows: Callable[[Scenario], bool] = _always
    """Whether a schedule of this scenario can show it; the others need not be tried."""


def with_faults(*kinds: FaultKind) -> Callable[[Scenario], bool]:
    """With at least one of these."""
    return lambda scenario: bool(scenario.families & {*kinds})


@contextmanager
def planted(mistake: Mistake | None) -> Iterator[None]:
    """The code has this mistake inside the block."""
    if mistake is None:
        yield
        return
    right = [_swap(place, mistake.attribute, mistake.wrong) for place in mistake.where]
    try:
        yield
    finally:
        for place, was in zip(mistake.where, right, strict=True):
            _swap(place, mistake.attribute, was)


def _swap(place: Any, attribute: Any, new: object) -> object:
    """Put something else there. Returns what was there before."""
    if isinstance(place, dict):
        was, place[attribute] = place[attribute], new
    else:
        was = getattr(place, attribute)
        setattr(place, attribute, new)
    return was
