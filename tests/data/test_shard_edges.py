"""Data sets of a ``Trainer`` at their edges: few samples, many workers, odd shapes, broken places."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

import everstep
from everstep import Checkpoint, ConfigError, RunConfig, ScalingConfig, Trainer
from everstep.data import JsonlFiles, ResumeRefusedError, Stream
from everstep.data.plan import Rank
from everstep.data.shard import DatasetShard
from everstep.errors import FunctionLoadError
from everstep.worker.datasets import agreed_places


def shards(ranks: int, source: Any, state: Any = None) -> list[DatasetShard]:
    """The same data set as each worker of a group has it."""
    group = [DatasetShard("train", source, Rank(rank, ranks)) for rank in range(ranks)]
    for shard in group:
        if state is not None:
            shard.load_state_dict(state)
    return group


def test_rows_are_the_samples_themselves() -> None:
    rows = [({"x": number, "text": "…"}, [number]) for number in range(5)]
    (shard,) = shards(1, rows)
    assert list(shard.iter_rows()) == rows
    assert list(shard.iter_rows()) == rows


def test_the_place_moves_row_by_row() -> None:
    (shard,) = shards(1, list("abcde"))
    rows = shard.iter_rows()
    assert [next(rows), next(rows)] == ["a", "b"]
    (resumed,) = shards(1, list("abcde"), shard.state_dict())
    assert list(resumed.iter_rows()) == ["c", "d", "e"]


def test_rows_of_a_stream_are_refused_because_its_place_moves_in_steps() -> None:
    (shard,) = shards(1, Stream(10, global_batch=4, micro_batch=2))
    with pytest.raises(ConfigError, match=r"iter_rows\(\).*Stream.*iter_batches"):
        next(shard.iter_rows())


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_a_rest_with_fewer_samples_than_workers_is_seen_whole_by_equally_many_batches(ranks: int) -> None:
    """After a resume with more workers. Those without a sample repeat one, and take part in the step."""
    (before,) = shards(1, range(57))
    next(before.iter_batches(batch_size=55))
    group = shards(ranks, range(57), before.state_dict())
    rest = list(zip(*(shard.iter_batches(batch_size=3) for shard in group), strict=True))
    assert [[batch.tolist() for batch in batches] for batches in rest] == [
        [[55], [56]] + [[55]] * (ranks - 2)
    ]
    again = [
        n for batches in zip(*(s.iter_batches(batch_size=3) for s in group), strict=True) for n in batches
    ]
    assert sorted(numpy.concatenate(again)) == list(range(57))


def test_batch_sizes_of_numpy_are_taken() -> None:
    (shard,) = shards(1, range(4))
    assert [batch.tolist() for batch in shard.iter_batches(batch_size=numpy.int64(2))] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("state", [None, {}, [], {"version": 1}, {"version": 1, "of": {}}, "abc"])
def test_a_place_that_is_broken_is_refused(state: Any) -> None:
    (shard,) = shards(1, range(9))
    with pytest.raises(ResumeRefusedError, match="'train'"):
        shard.load_state_dict(state)
    broken = {**shard.state_dict(), "sample": "x"}
    with pytest.raises(ResumeRefusedError, match="'train'"):
        shard.load_state_dict(broken)


# ---------------------------------------------------------------------- streams


class Worker(threading.local):
    """Which rank a thread is."""

    here = Rank(0, 1)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stream asks the run for its rank: give it one."""
    worker = Worker()
    monkeypatch.setattr("everstep.data.stream.rank_here", lambda: worker.here)

    def be(rank: int, ranks: int) -> None:
        worker.here = Rank(rank, ranks)

    return be


def of_each_rank(as_rank: Any, ranks: int, stream: Any) -> list[list[list[int]]]:
    """The batches of each worker."""
    found = []
    for rank in range(ranks):
        as_rank(rank, ranks)
        batches = DatasetShard("train", stream(), Rank(rank, ranks)).iter_batches()
        found.append([list(map(int, batch)) for batch in batches])
    return found


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_step_is_shared_evenly_however_large_its_micro_batches(as_rank: Any, ranks: int) -> None:
    """A batch has no weights, so that no worker may get padding."""
    found = of_each_rank(as_rank, ranks, lambda: Stream(24, global_batch=8, micro_batch=4, seed=1))
    for step in zip(*found, strict=True):
        assert sum(map(len, step)) == 8
        assert max(map(len, step)) - min(map(len, step)) <= 1
    assert sorted(n for batches in found for batch in batches for n in batch) == list(range(24))


def test_a_step_with_fewer_samples_than_workers_is_refused(as_rank: Any) -> None:
    with pytest.raises(ConfigError, match="2 samples for 3 workers"):
        of_each_rank(as_rank, 3, lambda: Stream(24, global_batch=2, micro_batch=1))


def test_a_data_set_is_handed_out_from_its_own_place_each_time() -> None:
    """Not from where another loop over the same stream, in the same process, has come to."""
    stream = Stream(10, global_batch=4, micro_batch=2)
    first = [batch.tolist() for batch in shards(1, stream)[0].iter_batches()]
    second = [batch.tolist() for batch in shards(1, stream)[0].iter_batches()]
    assert first == second
    assert stream.step == 0


def test_a_stream_with_a_rank_of_its_own_is_refused() -> None:
    """All workers would get the samples of that one."""
    stream = Stream(10, global_batch=4, micro_batch=2, rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"datasets\['train'\].*rank=0"):
        Trainer(lambda: None, datasets={"train": stream})


def test_a_stream_with_lanes_resumes_from_the_places_of_all_workers(as_rank: Any, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text(
            "".join(f"{line}\n" for line in range(number * 9, number * 9 + 9))
        )

    def stream() -> Stream:
        source = JsonlFiles(tmp_path.glob("*.jsonl"))
        return Stream(source, global_batch=4, micro_batch=2, lanes=2, epochs=None, window=3)

    def some(ranks: int, steps: int, place: Any = None) -> tuple[list[set[int]], dict[str, bytes]]:
        seen: list[set[int]] = [set() for _ in range(steps)]
        files = {}
        for rank in range(ranks):
            as_rank(rank, ranks)
            shard = DatasetShard("train", stream(), Rank(rank, ranks))
            if place is not None:
                shard.load_state_dict(place)
            for at, batch in zip(range(steps), shard.iter_batches(), strict=False):
                seen[at] |= set(map(int, batch))
            places = {"train": shard.state_dict()}
            files[f".everstep-data-{rank}.json"] = json.dumps({"places": places}).encode()
        return seen, files

    undisturbed, _ = some(1, 12)
    first, files = some(2, 5)
    second, _ = some(1, 7, agreed_places(files)["train"])
    assert first + second == undisturbed


# ---------------------------------------------------------------------- through a Trainer


def test_a_data_set_that_cant_be_pickled_is_named(tmp_path: Path) -> None:
    class Locked(list[int]):
        def __init__(self) -> None:
            super().__init__(range(5))
            self.lock = threading.Lock()

    with pytest.raises(FunctionLoadError, match=r"datasets\['train'\] can't be pickled: Locked"):
        Trainer(
            lambda: None, datasets={"train": Locked()}, run_config=RunConfig(storage_path=str(tmp_path))
        ).fit()


def test_a_data_set_that_is_too_large_to_be_sent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.protocol.framing.MAX_PAYLOAD", 1 << 20)
    large = numpy.zeros(2 << 20, dtype=numpy.uint8)
    with pytest.raises(FunctionLoadError, match=r"most of it datasets\['train'\]"):
        Trainer(
            lambda: None, datasets={"train": large}, run_config=RunConfig(storage_path=str(tmp_path))
        ).fit()


def report_a_folder(config: dict[str, Any]) -> None:
    batches = everstep.get_dataset_shard("train").iter_batches(batch_size=2)
    for _ in range(2):
        next(batches)
        everstep.report({}, checkpoint=Checkpoint.from_directory(config["folder"]))


def test_places_that_an_earlier_attempt_left_in_a_folder_arent_reported_again(tmp_path: Path) -> None:
    """As in a script that restores into a folder, goes on there, and reports it: with more workers before."""
    folder = tmp_path / "folder"
    folder.mkdir()
    stale = {"attempt": "another", "index": 7, "places": {"train": {"version": 1, "epoch": 0, "sample": 18}}}
    for rank in range(3):
        (folder / f".everstep-data-{rank}.json").write_text(json.dumps(stale))
    result = Trainer(
        report_a_folder,
        train_loop_config={"folder": str(folder)},
        datasets={"train": numpy.arange(20)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(tmp_path / "runs")),
    ).fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as reported:
        found = {path.name: path.read_bytes() for path in Path(reported).glob(".everstep-data-*")}
    assert list(found) == [".everstep-data-0.json"]
    [place] = agreed_places(found)["train"]
    assert place["sample"] == 4
