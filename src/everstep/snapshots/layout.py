"""How a rank's tensors lie in one run of bytes: a file in the safetensors format, and the index beside it.

A file is the length of its header (8 bytes, little-endian), the header (JSON) and the tensors' bytes. It
loads with ``safetensors`` and with anything else that reads the format. What the format can't say is in the
index: where a shard lies in the whole tensor, and all of the state that isn't a tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from everstep.errors import ConfigError

FORMAT = 1
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}
"""The format's types, with the size of one number."""


class Shard(msgspec.Struct, frozen=True, gc=False):
    """What a rank has of a tensor: all of it, or the part that begins at ``offset``."""

    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    file: str = ""
    """The file that has it: this rank's own, or the one that all ranks share."""

    @property
    def size(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Index(msgspec.Struct, frozen=True):
    """All that there is to know of one rank's share of a snapshot, but the tensors themselves."""

    step: int
    rank: int
    world_size: int
    tree: dict[str, Any]
    tensors: dict[str, Shard]
    places: dict[str, Any] = {}
    """Where in its data sets the rank was, by name."""
    format: int = FORMAT

    def encoded(self) -> bytes:
        rest = {name: getattr(self, name) for name in self.__struct_fields__ if name != "tensors"}
        # Not msgspec's JSON: a learning rate may be infinite, and a loss not a number. But it is quick, and
        # a thread that trains waits for this one.
        return json.dumps(rest)[:-1].encode() + b', "tensors": ' + msgspec.json.encode(self.tensors) + b"}"

    @classmethod
    def decoded(cls, data: bytes | memoryview) -> Index:
        return msgspec.convert(json.loads(bytes(data)), cls)


def places_in(index: bytes) -> bytes:
    """Of data sets, as a checkpoint of files has them."""
    return json.dumps({"places": Index.decoded(index).places}).encode()


SHARED_FILE = "state-shared.safetensors"
"""Tensors that are the same at all ranks."""


def tensors_file(rank: int) -> str:
    """Tensors that this rank alone has."""
    return f"state-{rank:05d}.safetensors"


def index_file(rank: int) -> str:
    return f"state-{rank:05d}.json"


def rank_of_index(path: str) -> int | None:
    """Whose index a file of a checkpoint is; None: it isn't one."""
    number = path.removeprefix("state-").removesuffix(".json")
    return int(number) if number.isdigit() and path == index_file(int(number)) else None


def rank_of_tensors(path: str) -> int | None:
    """Whose tensors a file has; None: those of all ranks."""
    number = path.removeprefix("state-").removesuffix(".safetensors")
    return int(number) if number.isdigit() else None


def holds_state(paths: Iterable[str]) -> bool:
    """Whether a checkpoint of these files is one of the training state."""
    return any(rank_of_index(path) is not None for path in paths)


def tree_of(shards: Mapping[str, Shard]) -> bytes:
    """What all ranks have in common of a state: the names, types and global shapes of its tensors."""
    return json.dumps({n: f"{s.dtype} {list(s.global_shape)}" for n, s in sorted(shards.items())}).encode()


def check_same(rank: int, mine: bytes, first: bytes) -> None:
    """Whether this rank's tree is the first rank's."""
    ours, theirs = json.loads(mine), json.loads(first)
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name, "not there"), theirs.get(name, "not there")
        if here != there:
            raise ConfigError(
                f"report(state=…): {name} is {here} at rank {rank}, and {there} at rank 0",
                "make the State of the same parts at all ranks, with tensors of the same names, types and "
                "global shapes",
                f"State.{name}",
            )


class Layout:
    """Where each tensor lies in a file."""

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        # The largest numbers first: each then lies at a multiple of its own size. Of these, the largest
        # tensors first: the small ones, which may be on another device, then don't lie between them.
        names = sorted(shards, key=lambda n: (-ITEM_BYTES[shards[n].dtype], -shards[n].size, n))
        entries: dict[str, Any] = {}
        end = 0
        for name in names:
            shard = shards[name]
            entries[name] = _entry(shard, end)
            end += shard.size
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        text += b" " * (-(8 + len(text)) % 64)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + end
        self.starts = {name: len(self.header) + entries[name]["data_offsets"][0] for name in names}


def _entry(shard: Shard, start: int) -> dict[str, Any]:
    return {"dtype": shard.dtype, "shape": list(shard.shape), "data_offsets": [start, start + shard.size]}


def starts_in(file: memoryview) -> dict[str, int]:
    """Where each tensor of a file begins."""
    length = int.from_bytes(file[:8], "little")
    entries = json.loads(bytes(file[8 : 8 + length]))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def overlap(one: Shard, other: Shard) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where the part that two shards of one tensor share lies in each of them; None: they share nothing."""
    here: list[slice] = []
    there: list[slice] = []
    for start, size, begin, length in zip(one.offset, one.shape, other.offset, other.shape, strict=True):
        first, last = max(start, begin), min(start + size, begin + length)
        if first >= last:
            return None
        here.append(slice(first - start, last - start))
        there.append(slice(first - begin, last - begin))
    return tuple(here), tuple(there)


def covered(shard: Shard, parts: Iterable[Shard]) -> int:
    """How many numbers of a shard these parts have, if none has the same as another."""
    total = 0
    for part in parts:
        shared = overlap(shard, part)
        if shared is not None:
            total += math.prod(s.stop - s.start for s in shared[0])
    return total
