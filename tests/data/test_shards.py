"""Sources that are read in sequence: one order for all numbers of ranks, filtering and packing inside."""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.ranks import streams
from everstep.data import DataError, JsonlFiles, NumpyFiles, ParquetFiles, ResumeRefusedError, Shards, Stream
from everstep.errors import ConfigError

COUNTS = [7, 0, 12, 3, 9, 1, 8]
BATCH = {"global_batch": 6, "micro_batch": 2, "seed": 4}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Lines that say which file and line they are."""
    for shard, count in enumerate(COUNTS):
        lines = [
            json.dumps({"id": shard * 100 + line, "tokens": [shard] * (line % 4)}) for line in range(count)
        ]
        (tmp_path / f"{shard}.jsonl").write_text("".join(f"{line}\n\n" for line in lines))
    return sorted(tmp_path.glob("*.jsonl"))


def number(sample: dict[str, Any]) -> int:
    return int(sample["id"])


def seen_by(steps: tuple[Any, ...]) -> list[int]:
    """What all ranks read in a step, in the order of the stream."""
    dealt = [[list(micro.batch)[: len(micro.ids)] for micro in step] for step in steps]
    most = max(map(len, dealt))
    return [int(n) for at in range(most) for rank in dealt if at < len(rank) for n in rank[at]]


def all_seen(world_size: int, source: Shards, **options: Any) -> list[list[int]]:
    return [seen_by(steps) for steps in zip(*streams(world_size, source, **options), strict=True)]


def test_every_line_comes_once_in_each_pass_in_an_order_of_its_own(files):
    source = JsonlFiles(files).map(number)
    flat = [n for step in all_seen(1, source, epochs=2, **BATCH) for n in step]
    expected = sorted(shard * 100 + line for shard, count in enumerate(COUNTS) for line in range(count))
    assert [sorted(flat[:40]), sorted(flat[40:])] == [expected, expected]
    assert flat[:40] != flat[40:]


def test_without_shuffling_lines_come_as_they_are(files):
    flat = [n for step in all_seen(2, JsonlFiles(files).map(number), shuffle=False, **BATCH) for n in step]
    assert flat == sorted(flat)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_the_order_is_the_same_for_every_number_of_ranks(files, world_size):
    source = JsonlFiles(files).map(number)
    options = {**BATCH, "epochs": 2, "window": 5}
    assert all_seen(world_size, source, **options) == all_seen(1, source, **options)


def odd(sample: dict[str, Any]) -> bool:
    return bool(sample["id"] % 2)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_stream_goes_on_from_any_step_on_any_number_of_ranks(files, window):
    source = JsonlFiles(files).filter(odd).map(number)
    options = {**BATCH, "epochs": 3, "window": window}
    undisturbed = all_seen(1, source, **options)
    chance, seen, cursor = random.Random(window), [], None
    while cursor is None or len(seen) < len(undisturbed):
        group = streams(chance.randint(1, 5), source, **options)
        for stream in group:
            if cursor is not None:
                stream.load_state_dict(cursor)
        for steps in zip(*group, strict=True):
            seen.append(seen_by(steps))
            cursor = json.loads(json.dumps(group[chance.randrange(len(group))].state_dict()))
            assert len(json.dumps(cursor)) <= 256
            if chance.random() < 0.4:
                break
    assert seen == undisturbed


def test_packed_samples_go_on_in_the_middle_of_a_sequence(files):
    source = JsonlFiles(files).map(lambda sample: sample["tokens"]).pack(4)
    whole = list(_read(source, shard=2))
    assert whole == [[2, 2, 2, 2]] * 4  # 0 + 1 + 2 + 3 tokens, three times
    for done in range(len(whole)):
        first = source.open(2)
        for _ in range(done):
            next(first)
        again = source.open(2)
        again.restore(json.loads(json.dumps(first.state())))
        assert list(_rest(again)) == whole[done:]


def _read(source: Shards, shard: int) -> Iterator[Any]:
    return _rest(source.open(shard))


def _rest(reader: Any) -> Iterator[Any]:
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return


def test_with_lanes_ranks_read_their_own_and_resume_from_all_of_their_cursors(files):
    source = JsonlFiles(files).map(number)
    options = {**BATCH, "epochs": None, "window": 3, "lanes": 3}

    def some(world_size: int, steps: int, cursors: Any = None) -> tuple[list[list[int]], list[Any]]:
        group = streams(world_size, source, **options)
        for stream in group:
            if cursors is not None:
                stream.load_state_dict(cursors)
        seen = [seen_by(each) for each, _ in zip(zip(*group, strict=True), range(steps), strict=False)]
        return seen, [stream.state_dict() for stream in group]

    undisturbed, _ = some(1, 30)
    first, cursors = some(3, 11)
    second, cursors = some(2, 8, cursors)
    third, _ = some(5, 11, cursors)
    assert first + second + third == undisturbed
    with pytest.raises(ResumeRefusedError, match="lacks lanes"):
        some(1, 1, cursors[0])


def test_lanes_that_end_at_different_steps_are_refused(files):
    with pytest.raises(ConfigError, match="lanes end at different steps") as caught:
        Stream(JsonlFiles(files), lanes=2, epochs=1, **BATCH)
    assert caught.value.field == "Stream.epochs"


@pytest.mark.parametrize("lanes", [0, 4, 8])
def test_lanes_that_cant_be_read_are_refused(files, lanes):
    with pytest.raises(ConfigError) as caught:
        Stream(JsonlFiles(files), lanes=lanes, epochs=None, **BATCH)
    assert caught.value.field == "Stream.lanes"


@pytest.mark.parametrize("changes", [{"window": 9}, {"seed": 5}])
def test_another_order_at_the_resume_is_refused(files, changes):
    cursor = Stream(JsonlFiles(files), **BATCH).state_dict()
    with pytest.raises(ResumeRefusedError) as caught:
        Stream(JsonlFiles(files), **{**BATCH, **changes}).load_state_dict(cursor)
    assert caught.value.field == f"Stream.{next(iter(changes))}"


def test_other_files_at_the_resume_are_refused(files):
    cursor = Stream(JsonlFiles(files), **BATCH).state_dict()
    files[0].write_text('{"id": 1}\n')
    with pytest.raises(ResumeRefusedError, match="source was 'JsonlFiles-.*' and is 'JsonlFiles-"):
        Stream(JsonlFiles(files), **BATCH).load_state_dict(cursor)


def test_a_shard_that_got_shorter_is_named(files):
    stream = Stream(JsonlFiles(files).map(number), name="lines", shuffle=False, window=1, **BATCH)
    list(next(iter(stream)))
    cursor = stream.state_dict()
    files[0].write_text("")
    stream.load_state_dict(cursor)
    with pytest.raises(DataError, match="0.jsonl is shorter than when the place in it was saved"):
        next(iter(stream))


def test_a_line_that_isnt_json_is_named(files):
    files[0].write_text('{"id": 1}\n{"id"\n')
    stream = Stream(JsonlFiles(files), shuffle=False, **BATCH)
    with pytest.raises(DataError, match="0.jsonl has no JSON at byte 10"):
        next(iter(stream))
    assert stream.step == 0


def test_a_source_of_which_nothing_is_left_is_named(files):
    with pytest.raises(DataError, match="no sample in pass 0"):
        next(iter(Stream(JsonlFiles(files).filter(lambda sample: False), epochs=None, **BATCH)))


def test_a_reader_whose_state_grows_is_refused(files):
    class Remembering(Shards):
        def __len__(self):
            return 1

        def fingerprint(self):
            return ""

        def open(self, shard):
            return Reader()

    class Reader:
        def __init__(self):
            self.seen = list(range(100))

        def __next__(self):
            return len(self.seen)

        def state(self):
            return self.seen

        def restore(self, state):
            self.seen = state

    stream = Stream(Remembering(), window=2, **BATCH)
    list(next(iter(stream)))
    with pytest.raises(ConfigError, match="state of a reader of lane 0 has 390 bytes"):
        stream.state_dict()


def test_parquet_is_read_row_by_row_and_resumed_inside_of_a_row_group(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(25)), "text": ["…"] * 25})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    source = ParquetFiles([tmp_path / "a.parquet"], columns=["id"])
    assert list(_read(source, 0)) == [{"id": row} for row in range(25)]
    for done in (0, 3, 4, 11, 25):
        reader = source.open(0)
        reader.restore(done)
        assert [row["id"] for row in _rest(reader)] == list(range(done, 25))
        assert reader.state() == 25
    with pytest.raises(DataError, match="26 rows were read of it, and it has 25"):
        source.open(0).restore(26)


def test_arrays_in_files_are_one_source(tmp_path):
    numpy = pytest.importorskip("numpy")
    for file, (first, last) in enumerate([(0, 5), (5, 6), (6, 20)]):
        numpy.save(tmp_path / f"{file}.npy", numpy.arange(first, last)[:, None] * [1, 10])
    source = NumpyFiles(tmp_path.glob("*.npy"))
    assert len(source) == 20
    step = next(iter(Stream(source, **BATCH)))
    for micro in step:
        assert micro.batch.tolist() == [[n, n * 10] for n in micro.ids]
    with pytest.raises(IndexError):
        source[20]


@pytest.mark.parametrize("kind", [NumpyFiles, JsonlFiles, ParquetFiles])
def test_files_that_arent_there_are_named(kind, tmp_path):
    with pytest.raises(ConfigError, match="no file .*missing") as caught:
        kind([tmp_path / "missing"])
    assert caught.value.field == f"{kind.__name__}.paths"
    with pytest.raises(ConfigError, match="no files"):
        kind([])


def flat(steps: Any) -> list[int]:
    return [int(n) for step in steps for micro in step for n in list(micro.batch)[: len(micro.ids)]]


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_place_to_the_very_end_has_the_rest_and_no_more(files, window, drop_last):
    """40 lines in steps of 6: the last one is smaller. More passes can be asked for at any of them."""
    source = JsonlFiles(files).map(number)

    def a_stream(epochs: int) -> Stream:
        return Stream(source, **BATCH, epochs=epochs, window=window, drop_last=drop_last)

    for epochs in (1, 2):
        expected = flat(a_stream(epochs))
        for done in range(8):
            first = a_stream(1)
            seen = flat(step for step, _ in zip(first, range(done), strict=False)) if done else []
            second = a_stream(epochs)
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert seen + flat(second) == expected, f"after {done} steps, {epochs} passes"


@pytest.mark.parametrize(
    "change", [{"window": 2}, {"window": 50}, {"seed": 5}, {"shuffle": False}, {"global_batch": 8}]
)
@pytest.mark.parametrize("done", [1, 4])
def test_another_order_that_was_asked_for_gives_whole_samples(files, change, done):
    """Lines have different lengths, so that an offset in one file is no beginning of a line in another."""
    source = JsonlFiles(files).map(number)
    options = {**BATCH, "window": 7}
    going = Stream(source, **options)
    flat(step for step, _ in zip(going, range(done), strict=False))
    changed = Stream(source, **{**options, **change}, accept_changes=list(change))
    changed.load_state_dict(going.state_dict())
    every = {shard * 100 + line for shard, count in enumerate(COUNTS) for line in range(count)}
    later = flat(changed)
    assert later
    assert set(later) <= every
    if change.keys() == {"global_batch"}:
        again = Stream(source, **options)
        again.load_state_dict(going.state_dict())
        assert later == flat(again)


def test_an_empty_shard_doesnt_end_a_run_with_lanes(tmp_path):
    """Lanes get other shards in every pass, and some of them only the empty ones."""
    for shard, count in enumerate([5, 0, 6, 0]):
        (tmp_path / f"{shard}.jsonl").write_text("".join(f"{shard * 100 + line}\n" for line in range(count)))
    source = JsonlFiles(tmp_path.glob("*.jsonl"))
    options = {"global_batch": 4, "micro_batch": 2, "lanes": 2, "epochs": None}
    together = zip(*streams(2, source, **options), strict=True)
    seen = [seen_by(steps) for steps, _ in zip(together, range(60), strict=False)]
    alone = [seen_by((step,)) for step, _ in zip(Stream(source, **options), range(60), strict=False)]
    assert seen == alone
    assert len({number for step in seen for number in step}) == 11


def test_lanes_of_which_nothing_is_left_are_named(files):
    source = JsonlFiles(files).filter(lambda sample: False)
    with pytest.raises(DataError, match="no sample in"):
        next(iter(Stream(source, lanes=2, epochs=None, **BATCH)))


def test_a_shard_that_is_gone_is_named_at_its_turn_and_at_a_resume(files):
    source = JsonlFiles(files).map(number)
    stream = Stream(source, window=1, shuffle=False, name="lines", **BATCH)
    steps = iter(stream)
    list(next(steps))
    list(next(steps))
    files[2].unlink()
    resumed = Stream(source, window=1, shuffle=False, name="lines", **BATCH)
    resumed.load_state_dict(stream.state_dict())
    with pytest.raises(DataError, match=r"Shard 2 can't be read.*FileNotFoundError.*2\.jsonl"):
        list(resumed)
    with pytest.raises(DataError, match=r"Shard 2 can't be read.*FileNotFoundError.*2\.jsonl"):
        list(Stream(source, shuffle=False, name="lines", **BATCH))


def test_a_broken_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1xx")
    with pytest.raises(DataError, match=r"Shard 0 can't be read.*ArrowInvalid"):
        list(Stream(ParquetFiles(tmp_path / "a.parquet"), **BATCH))


def test_without_pyarrow_parquet_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        ParquetFiles(tmp_path / "a.parquet")


@pytest.mark.parametrize("change", ["map", "filter"])
def test_a_function_that_raises_stop_iteration_doesnt_end_the_shard(files, change):
    def broken(sample: dict[str, Any]) -> Any:
        return next(iter([])) if sample["id"] == 203 else sample["id"]

    source = getattr(JsonlFiles(files), change)(broken)
    with pytest.raises(DataError, match="broken raised StopIteration"):
        list(Stream(source, **BATCH))


def test_arrays_in_files_travel_as_their_paths(tmp_path):
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "a.npy", numpy.arange(200_000))
    travelled = pickle.dumps(NumpyFiles(tmp_path / "a.npy"))
    assert len(travelled) < 1000
    assert pickle.loads(travelled)[199_999] == 199_999


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("even", [False, True])
def test_lanes_have_one_order_through_resizes_over_every_number_of_ranks(files, lanes, even):
    """Each attempt is broken off in the middle of a step, or after one, and goes on from all cursors."""
    source = JsonlFiles(files).filter(odd).map(number)
    options = {**BATCH, "epochs": None, "window": 4, "lanes": lanes, "even": even}
    undisturbed = [seen_by((step,)) for step, _ in zip(Stream(source, **options), range(80), strict=False)]
    seen: list[list[int]] = []
    cursors: list[Any] = []
    for world_size in [*range(1, 17), 3, 16, 1]:
        group = streams(world_size, source, **options)
        for stream in group:
            if cursors:
                stream.load_state_dict(cursors)
        for steps, _ in zip(zip(*group, strict=True), range(4), strict=False):
            seen.append(seen_by(steps))
            cursors = json.loads(json.dumps([stream.state_dict() for stream in group]))
        next(iter(next(iter(group[0]))))  # begun, and lost
    assert len(seen) == 76
    assert seen == undisturbed[:76]
