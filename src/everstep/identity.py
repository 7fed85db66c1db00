"""The identity of one incarnation of a replica group, and of one process of a rank."""

from __future__ import annotations

from typing import NamedTuple


class Incarnation(NamedTuple):
    """Whose count an index is of: a replica group's, from the start of its workers. Without groups, there is
    one.
    """

    epoch: int
    group: int
    generation: int


class WorkerId(NamedTuple):
    """One process of a rank."""

    epoch: int
    generation: int
    rank: int
