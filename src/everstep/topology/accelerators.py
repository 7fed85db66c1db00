"""TPU generations: which topologies each comes in, and how many chips, hosts and workers a slice of one has.

Facts and arithmetic. What a cluster's own labels say wins over this table; that is ``discovery``'s.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

CHIPS_PER_HOST = 4
"""What a host of a multi-host slice has, in every generation."""


class TopologyError(ValueError):
    """Something that no TPU has. ``expected`` and ``remedy`` are for the message."""

    def __init__(self, field: str, seen: object, expected: str, remedy: str) -> None:
        super().__init__(f"{field} is {seen!r}, expected {expected}")
        self.field = field
        self.seen = seen
        self.expected = expected
        self.remedy = remedy


def _cubes(x: int, y: int, z: int) -> tuple[str, ...]:
    """Blocks of whole 4x4x4 cubes, up to this size."""
    return tuple(
        f"{i}x{j}x{k}" for i in range(4, x + 1, 4) for j in range(4, y + 1, 4) for k in range(4, z + 1, 4)
    )


_PART_OF_A_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_FLAT = ("4x4", "4x8", "8x8", "8x16", "16x16")
_ON_ONE_HOST = ("1x1", "2x2", "2x4")


@dataclass(frozen=True)
class Generation:
    """One kind of TPU."""

    name: str
    topologies: tuple[str, ...]
    cores_per_chip: int = 2
    """By which pod types count: a ``v4-16`` has 8 chips, a ``v6e-16`` has 16."""
    single_host: tuple[str, ...] = ()
    """Topologies of which all chips are on one host, however many."""

    def check(self, topology: str) -> None:
        if topology in self.topologies:
            return
        sides = sorted(map(int, topology.split("x"))) if _is_topology(topology) else []
        turned = next((t for t in self.topologies if sides and sorted(map(int, t.split("x"))) == sides), None)
        close = turned or next(iter(difflib.get_close_matches(topology, self.topologies, n=1)), None)
        raise TopologyError(
            "topology",
            topology,
            f"one of {self.name}'s: {_listed(self.topologies)}",
            f"Did you mean {close!r}" if close else "Pick one of these",
        )


GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("v2", _FLAT),
        Generation("v3", (*_FLAT, "16x32", "32x32")),
        Generation("v4", (*_PART_OF_A_CUBE, *_cubes(12, 12, 16))),
        Generation("v5p", (*_PART_OF_A_CUBE, *_cubes(16, 16, 24))),
        Generation("v5e", (*_ON_ONE_HOST, "2x8", *_FLAT), 1, _ON_ONE_HOST),
        Generation("v6e", (*_ON_ONE_HOST, "2x8", *_FLAT), 1, _ON_ONE_HOST),
        Generation(
            "v7x",
            (*_PART_OF_A_CUBE, "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
        ),
    )
}

_OTHER_NAMES = {"v5litepod": "v5e", "v5lite": "v5e", "v7": "v7x"}


def generation_of(accelerator_type: str) -> Generation:
    """``TPU-V6E``, ``v6e``, or a pod type such as ``v6e-16``."""
    name = accelerator_type.lower().removeprefix("tpu-").partition("-")[0]
    found = GENERATIONS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        names = [f"TPU-{known.upper()}" for known in GENERATIONS]
        close = difflib.get_close_matches(accelerator_type.upper(), names, n=1)
        raise TopologyError(
            "accelerator_type",
            accelerator_type,
            f"one of {', '.join(names)}",
            f"Did you mean {close[0]!r}" if close else "Pick one of these",
        )
    return found


def chips_in(topology: str) -> int:
    """``4x4`` has 16."""
    if not _is_topology(topology):
        raise TopologyError("topology", topology, "two or three sizes", "Write '4x4' or '2x2x4', for example")
    return math.prod(map(int, topology.split("x")))


def chips_in_pod(pod_type: str) -> int:
    """Of a pod type: ``v6e-16`` has 16 chips, ``v4-16`` has 8."""
    count = pod_type.rpartition("-")[2]
    if not count.isdecimal():
        raise TopologyError("pod type", pod_type, "a name and a number", "Write 'v6e-16', for example")
    return int(count) // generation_of(pod_type).cores_per_chip


@dataclass(frozen=True)
class SliceShape:
    """A slice of one topology."""

    generation: str
    topology: str
    chips: int
    chips_per_host: int

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host

    def workers(self, chips_per_worker: float) -> int:
        """How many workers a slice has. Chips a worker must divide the chips of a host."""
        whole = int(chips_per_worker)
        if whole != chips_per_worker or whole < 1 or self.chips_per_host % whole:
            fitting = [n for n in range(1, self.chips_per_host + 1) if self.chips_per_host % n == 0]
            raise TopologyError(
                "resources_per_worker['TPU']",
                chips_per_worker,
                f"a divisor of the {self.chips_per_host} chips that a host of a {self.generation} "
                f"{self.topology} has",
                f"Use {' or '.join(map(str, fitting))}",
            )
        return self.chips // whole


def slice_shape(accelerator_type: str, topology: str) -> SliceShape:
    """The shape by the table. Raises ``TopologyError`` for what there is none of."""
    chips = chips_in(topology)
    generation = generation_of(accelerator_type)
    generation.check(topology)
    on_one = topology in generation.single_host
    return SliceShape(generation.name, topology, chips, chips if on_one else min(chips, CHIPS_PER_HOST))


def nearest_multiples(number: int, of: int) -> list[int]:
    """The multiples just below and above, without 0."""
    below = number - number % of
    return [n for n in (below, below + of) if n > 0] if number % of else [number]


def _is_topology(text: object) -> bool:
    sides = text.split("x") if isinstance(text, str) else []
    return len(sides) in (2, 3) and all(side.isdecimal() and int(side) > 0 for side in sides)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:5])}, … {names[-1]}"
