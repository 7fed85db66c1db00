"""Streams of several ranks in one process, and what they train on together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everstep.data import Step, Stream


def streams(world_size: int, source: Any, **options: Any) -> list[Stream]:
    """The same stream as each rank of a group has it."""
    return [Stream(source, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def in_step(group: list[Stream]) -> Iterator[tuple[Step, ...]]:
    """The steps of all ranks side by side. All have equally many."""
    return zip(*group, strict=True)


def ids_of(steps: tuple[Step, ...]) -> list[int]:
    """The samples that all ranks see in a step, in the order of the stream."""
    dealt = [[micro.ids for micro in step] for step in steps]
    most = max(map(len, dealt))
    return [number for at in range(most) for rank in dealt if at < len(rank) for number in rank[at]]


def all_ids(world_size: int, source: Any, **options: Any) -> list[list[int]]:
    """The samples of each step from beginning to end."""
    return [ids_of(steps) for steps in in_step(streams(world_size, source, **options))]
