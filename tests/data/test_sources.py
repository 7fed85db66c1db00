"""What counts as a source, how sources are told apart, and what their samples become."""

from __future__ import annotations

import subprocess
import sys

import pytest

from everstep.data import SampleError, ShortSourceError, Stream
from everstep.data.sources import identity_of, stacked
from everstep.errors import ConfigError

BATCH = {"global_batch": 4, "micro_batch": 4}


class Rows:
    """As Hugging Face's data sets are: rows by number, many at once, and a fingerprint."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": index, "text": f"row {index}"}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def first_micro(source, **options):
    return next(iter(next(iter(Stream(source, **BATCH, **options)))))


def test_rows_of_a_hugging_face_data_set_become_columns():
    micro = first_micro(Rows("abc"))
    assert list(micro.x) == micro.ids
    assert micro.batch["text"] == [f"row {number}" for number in micro.ids]


def test_sources_are_told_apart_by_their_fingerprint_name_shape_or_type():
    numpy = pytest.importorskip("numpy")
    sources = [Rows("abc"), Rows("abd"), [1], (1,), numpy.zeros(3), numpy.zeros((3, 2)), 5]
    assert len({identity_of(source, None) for source in sources}) == len(sources)
    assert identity_of(Rows("abc"), None) == identity_of(Rows("abc"), None)
    assert identity_of([1], "mine") == identity_of((1,), "mine") != identity_of([1], "other")


def test_pairs_and_named_parts_have_x_and_y():
    numpy = pytest.importorskip("numpy")
    micro = first_micro([(float(number), numpy.full(2, number)) for number in range(8)])
    assert micro.x.tolist() == micro.ids
    assert micro.y.tolist() == [[number] * 2 for number in micro.ids]
    with pytest.raises(ConfigError, match=r"micro\.x: the batch is a list"):
        _ = first_micro(list("abcdefgh")).x


def test_a_collate_fn_of_ones_own_makes_the_batch():
    assert sorted(first_micro(4, collate_fn=tuple).batch) == [0, 1, 2, 3]


def test_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    batch = stacked([(torch.ones(2), 1), (torch.zeros(2), 2)])
    assert batch[0].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert isinstance(batch[0], torch.Tensor)


@pytest.mark.parametrize("loaded_by", ["the stream", "a loader"])
def test_a_source_that_leaves_out_samples_when_many_are_asked_for_is_named(loaded_by):
    pytest.importorskip("torch")

    class Filtering(Rows):
        def __getitems__(self, indices):
            return [self[index] for index in indices if index != 3]

    stream = Stream(Filtering("abc"), global_batch=8, micro_batch=8)
    with pytest.raises(SampleError, match=r"__getitems__ gave 7 samples for 8 numbers"):
        list(next(iter(stream if loaded_by == "the stream" else stream.loader())))
    assert stream.step == 0


def test_a_source_that_gets_shorter_while_it_is_used_is_named_with_its_length_now():
    rows = list(range(8))
    stream = Stream(rows, global_batch=8, micro_batch=8)
    del rows[5:]
    with pytest.raises(ShortSourceError, match="list has 5 samples now, and this one isn't there"):
        list(next(iter(stream)))


def test_numpy_is_seeded_even_if_the_data_set_is_the_first_to_import_it():
    script = (
        "from everstep.data import Stream\n"
        "class Noise:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index):\n"
        "        import numpy\n"
        "        return numpy.random.rand()\n"
        "(micro,) = next(iter(Stream(Noise(), global_batch=4, micro_batch=4)))\n"
        "print(micro.batch.tolist())\n"
    )
    pytest.importorskip("numpy")
    runs = [
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
