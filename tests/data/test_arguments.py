"""What a stream is made from: numbers of any kind, and nothing that only looks like one."""

from __future__ import annotations

import json

import numpy
import pytest

from data.ranks import ids_of
from everstep.data import Stream
from everstep.errors import ConfigError

PLAIN = {"global_batch": 4, "micro_batch": 2, "seed": 3, "epochs": 2, "shuffle": True, "drop_last": False}


def test_numbers_of_numpy_are_taken_as_pythons_own():
    theirs = {name: numpy.asarray(value)[()] for name, value in PLAIN.items()}
    stream = Stream(numpy.int64(10), **theirs, rank=numpy.int32(0), world_size=numpy.uint8(1))
    expected = Stream(10, **PLAIN, rank=0, world_size=1)
    assert json.dumps(stream.state_dict()) == json.dumps(expected.state_dict())
    assert [ids_of((step,)) for step in stream] == [ids_of((step,)) for step in expected]
    assert json.dumps(stream.state_dict()) == json.dumps(expected.state_dict())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 0.0}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"global_batch": numpy.float64(4)}, "global_batch"),
        ({"shuffle": "no"}, "shuffle"),
        ({"drop_last": None}, "drop_last"),
        ({"even": 2}, "even"),
        ({"rank": "0", "world_size": "2"}, "rank"),
        ({"rank": -1, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 0}, "world_size"),
    ],
)
def test_anything_else_is_refused_by_name(changes, field):
    with pytest.raises(ConfigError, match=f"Stream.{field} is ") as caught:
        Stream(10, **{**PLAIN, **changes})
    assert caught.value.field == f"Stream.{field}"


def test_a_source_can_have_2_to_the_62_samples_and_no_more():
    class Endless:
        def __len__(self):
            return 2**63

        def __getitem__(self, index):
            return index

    step = next(iter(Stream(2**62, global_batch=64, micro_batch=32)))
    assert len(set(ids_of((step,)))) == 64
    for source in (2**62 + 1, Endless()):
        with pytest.raises(ConfigError, match=r"4611686018427387904 or fewer") as caught:
            Stream(source, **PLAIN)
        assert caught.value.field == "Stream.source"


@pytest.mark.parametrize("name", ["日本語の文章" * 5, "😀" * 20, "a" * 300])
def test_the_cursor_stays_small_whatever_the_name(name):
    far = Stream(10**12, global_batch=10**6, micro_batch=10**5, seed=-(2**63), epochs=None, name=name)
    assert len(json.dumps({**far.state_dict(), "step": 10**15, "sample": 10**18})) <= 256


def test_a_tensor_with_one_number_is_a_source_of_one_sample():
    torch = pytest.importorskip("torch")
    for source in (torch.tensor([5]), numpy.array([5])):
        step = next(iter(Stream(source, global_batch=4, micro_batch=2)))
        assert [(micro.ids, micro.batch.tolist()) for micro in step] == [([0], [5])]
