"""What a snapshot looks like in bytes."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.memory import Memory
from everstep.errors import ConfigError
from everstep.saved.snapshots import At
from everstep.snapshots.layout import Index, Layout, Shard, covered, overlap, rank_of_index
from everstep.snapshots.segments import FileContent, Segment, Slot
from everstep.snapshots.tree import Flattened, rebuild


class Tensor:
    """Stands for one."""


def flat(value: Any) -> Flattened:
    return Flattened({"part": value}, lambda found: isinstance(found, Tensor))


def there_and_back(value: Any) -> Any:
    flattened = flat(value)
    tree = json.loads(json.dumps(flattened.tree))
    return rebuild(tree, lambda name, path: flattened.tensors[name])["part"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "x", True, math.inf],
        {"state": {0: {"step": 3}, 1: {"step": 4}}, "groups": [{"betas": (0.9, 0.99), "params": [0, 1]}]},
        {"$tensor": 1, "plain": {"nested": []}},
        {(1, "a"): b"\x00\xff"},
        Counter({3: 1, 5: 2}),
        {},
    ],
)
def test_a_tree_comes_back_as_it_was(value: Any) -> None:
    assert there_and_back(value) == value
    assert type(there_and_back(value)) is type(value)


def test_an_ordered_dict_comes_back_as_a_dict() -> None:
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}


def test_tensors_are_named_by_where_they_lie() -> None:
    found = flat({"w": Tensor(), 0: Tensor(), "0": [Tensor(), 1]})
    assert list(found.tensors) == ["part/w", "part/0", "part/0/0"]


def test_two_tensors_never_have_one_name() -> None:
    found = flat({0: Tensor(), "0": Tensor()})
    assert list(found.tensors) == ["part/0", "part/0'"]


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        flat({"a": [object()]})
    assert "part['a'][0] in the state is a builtins.object" in str(caught.value)
    assert caught.value.field == "State.part"


@pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors")
def test_a_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    shards = {
        "flag": Shard("BOOL", (3,), (3,), (0,)),
        "step": Shard("I64", (), (), ()),
        "half": Shard("BF16", (2, 2), (4, 2), (2, 0)),
        "none": Shard("F32", (0, 4), (0, 4), (0, 0)),
    }
    layout = Layout(shards)
    data = bytearray(layout.size)
    data[: len(layout.header)] = layout.header
    torch.frombuffer(data, dtype=torch.int64, count=1, offset=layout.starts["step"])[0] = 7
    torch.frombuffer(data, dtype=torch.bfloat16, count=4, offset=layout.starts["half"])[:] = 1.5
    (tmp_path / "x.safetensors").write_bytes(data)
    found = load_file(tmp_path / "x.safetensors")
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        name: list(shard.shape) for name, shard in shards.items()
    }
    assert found["step"].item() == 7
    assert found["half"].tolist() == [[1.5, 1.5], [1.5, 1.5]]


def test_an_index_comes_back_as_it_was() -> None:
    shard = Shard("F32", (2,), (4,), (2,), "state-00001.safetensors")
    index = Index(3, 1, 2, {"lr": math.inf, "w": {"$tensor": "w"}}, {"w": shard}, {"train": [1]})
    assert Index.decoded(index.encoded()) == index


def test_indices_are_known_by_their_names() -> None:
    assert rank_of_index("state-00012.json") == 12
    assert rank_of_index("state-12.json") is rank_of_index("state-shared.json") is rank_of_index("x") is None


def test_shards_overlap_where_they_hold_the_same_numbers() -> None:
    whole = Shard("F32", (4, 6), (4, 6), (0, 0))
    right = Shard("F32", (4, 2), (4, 6), (0, 4))
    corner = Shard("F32", (2, 3), (4, 6), (2, 3))
    assert overlap(whole, right) == ((slice(0, 4), slice(4, 6)), (slice(0, 4), slice(0, 2)))
    assert overlap(right, corner) == ((slice(2, 4), slice(0, 2)), (slice(0, 2), slice(1, 3)))
    assert overlap(right, Shard("F32", (4, 4), (4, 6), (0, 0))) is None
    assert covered(whole, [right, Shard("F32", (4, 4), (4, 6), (0, 0))]) == 24


def test_a_slot_holds_a_snapshot_only_once_it_is_finished() -> None:
    slot = Slot.create("test", {"state": 16})
    assert slot.label is None
    slot.finish(At(2, 7), 2, b"notes", {"state": b"d" * 32})
    assert slot.label is not None
    assert (slot.label.at, slot.notes) == ((2, 7), b"notes")
    record = slot.record
    assert record is not None
    assert record.is_sound
    assert record.contents == {"state": FileContent(16, b"d" * 32)}
    slot.clear()
    assert slot.label is None
    slot.finish(At(2, 8), 2, b"longer notes" * 1000, {"state": b"e" * 32})
    assert slot.notes == b"longer notes" * 1000
    slot.close()


@pytest.mark.parametrize("place", [16, 24, 32])
def test_a_slot_whose_label_is_damaged_is_not_taken_for_another_snapshot(place: int) -> None:
    slot = Slot.create("test", {"state": 16})
    slot.finish(At(2, 7), 2, b"notes", {"state": b"d" * 32})
    memory = Memory()
    memory.add_copy(0, At(2, 7), slot)
    assert [copy.index for copy in memory.copies()] == [7]
    os.pwrite(slot.fds[0], b"\x05", place)
    record = slot.record
    assert record is not None
    assert not record.is_sound
    assert memory.copies() == []
    memory.clear()


def test_whoever_else_holds_a_slot_sees_it_as_it_is_after_its_notes_have_grown() -> None:
    slot = Slot.create("test", {"state": 16})
    agents = Slot.of(["state"], [os.dup(fd) for fd in slot.fds])
    assert agents.label is None, "which maps it as small as it is"
    slot.finish(At(2, 7), 2, b"long notes" * 1000, {"state": b"d" * 32})
    record = agents.record
    assert record is not None
    assert record.is_sound
    assert record.contents == {"state": FileContent(16, b"d" * 32)}
    agents.close()
    slot.close()


def test_a_segment_is_a_file_for_whoever_reads_files() -> None:
    segment = Segment.create("test", 4)
    segment.map()[:] = b"abcd"
    assert segment.path.read_bytes() == b"abcd"
    segment.close()
