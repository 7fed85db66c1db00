"""``Trainer(datasets=…)`` and ``get_dataset_shard()``, through failures and with other numbers of workers."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy
import pytest

import everstep
from everstep import (
    Checkpoint,
    CheckpointUploadMode,
    ConfigError,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    WorkerGroupError,
)
from everstep.data import ResumeRefusedError, Stream
from everstep.data.plan import Rank
from everstep.data.shard import DatasetShard

LENGTH = 57
ROWS = [{"id": number, "half": number / 2} for number in range(LENGTH)]


def fit(tmp_path: Path, function: Any, workers: int, config: dict[str, Any], **datasets: Any) -> Result:
    return Trainer(
        function,
        train_loop_config=config,
        datasets=datasets,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(tmp_path / "runs"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


def save(seen: list[Any]) -> Checkpoint:
    folder = tempfile.mkdtemp()
    Path(folder, f"seen-{everstep.get_context().get_world_rank()}.json").write_text(json.dumps(seen))
    return Checkpoint.from_directory(folder)


def everything_seen(folder: Path) -> list[int]:
    return sorted(n for path in folder.glob("seen-*.json") for n in json.loads(path.read_text()))


def see_all(config: dict[str, Any]) -> None:
    """Go through the data once, saving each batch's ids with its checkpoint. Rank 0 keeps what all have seen
    before this attempt.
    """
    rank = everstep.get_context().get_world_rank()
    seen: list[int] = []
    if checkpoint := everstep.get_checkpoint():
        with checkpoint.as_directory() as folder:
            seen = everything_seen(Path(folder)) if rank == 0 else []
    shard = everstep.get_dataset_shard("train")
    for number, batch in enumerate(shard.iter_batches(batch_size=config["batch"])):
        seen += [int(n) for n in batch["id"]]
        mode = CheckpointUploadMode[config.get("mode", "SYNC")]
        everstep.report({"n": number}, checkpoint=save(seen), checkpoint_upload_mode=mode)
        die = Path(config["here"], "die")
        if rank == config.get("dies") and number == 3 and not die.exists():
            die.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == config.get("stop_after"):
            raise RuntimeError("enough")
    everstep.report({"n": -1}, checkpoint=save(seen))


@pytest.mark.parametrize("mode", ["SYNC", "ASYNC"])
def test_each_sample_is_seen_once_although_a_worker_is_killed(tmp_path: Path, mode: str) -> None:
    config = {"batch": 3, "here": str(tmp_path), "dies": 1, "mode": mode}
    result = fit(tmp_path, see_all, 2, config, train=ROWS)
    assert (tmp_path / "die").exists()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert everything_seen(Path(folder)) == list(range(LENGTH))


def test_a_pass_goes_on_with_another_number_of_workers_and_another_batch(tmp_path: Path) -> None:
    config = {"batch": 3, "here": str(tmp_path)}
    run = RunConfig(name="run", storage_path=str(tmp_path / "runs"))
    with pytest.raises(WorkerGroupError, match="enough"):
        Trainer(
            see_all,
            train_loop_config={**config, "stop_after": 2},
            datasets={"train": ROWS},
            scaling_config=ScalingConfig(num_workers=3),
            run_config=run,
        ).fit()
    result = fit(tmp_path, see_all, 2, {**config, "batch": 5}, train=ROWS)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert everything_seen(Path(folder)) == list(range(LENGTH))


def test_a_stream_is_a_data_set_as_well(tmp_path: Path) -> None:
    stream = Stream(ROWS[:54], global_batch=8, micro_batch=2, seed=3)
    config = {"batch": None, "here": str(tmp_path), "dies": 0}
    result = fit(tmp_path, see_all, 2, config, train=stream)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert everything_seen(Path(folder)) == list(range(54))


def test_another_data_set_at_the_resume_is_refused_by_name(tmp_path: Path) -> None:
    config = {"batch": 3, "here": str(tmp_path), "stop_after": 2}
    with pytest.raises(WorkerGroupError, match="enough"):
        fit(tmp_path, see_all, 1, config, train=ROWS)
    with pytest.raises(WorkerGroupError, match="'train' isn't the one whose place was saved"):
        fit(tmp_path, see_all, 1, config, train=ROWS[:-1])


def test_in_this_process_it_works_the_same(tmp_path: Path) -> None:
    result = fit(tmp_path, see_all, 0, {"batch": 10, "here": str(tmp_path)}, train=ROWS)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert everything_seen(Path(folder)) == list(range(LENGTH))


def test_the_only_data_set_needs_no_name_and_another_name_is_refused(tmp_path: Path) -> None:
    def function() -> None:
        assert everstep.get_dataset_shard() is everstep.get_dataset_shard("numbers")
        with pytest.raises(ConfigError, match="given 'numbers'"):
            everstep.get_dataset_shard("train")

    Trainer(
        function,
        datasets={"numbers": range(4)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()


def test_tensors_are_on_the_workers_device_with_the_dtypes_asked_for(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def function() -> None:
        shard = everstep.get_dataset_shard("train")
        first = next(
            shard.iter_torch_batches(batch_size=4, dtypes={"id": torch.int16, "half": torch.float32})
        )
        assert (first["id"].dtype, first["half"].dtype) == (torch.int16, torch.float32)
        assert first["half"].device == everstep.torch.get_device()

    Trainer(
        function,
        datasets={"train": ROWS},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()


def test_a_checkpoint_without_a_place_begins_the_data_anew_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> int:
        if everstep.get_checkpoint() is None:
            everstep.report({}, checkpoint=save([]))
            raise RuntimeError("once more")
        return int(next(everstep.get_dataset_shard("train").iter_batches(batch_size=5))["id"][0])

    result = Trainer(
        function,
        datasets={"train": ROWS},
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.return_value == 0
    assert "no place of the data set 'train'" in capfd.readouterr().err


# ---------------------------------------------------------------------- without a run


def a_shard(rank: int = 0, ranks: int = 1, source: Any = ROWS) -> DatasetShard:
    return DatasetShard("train", source, Rank(rank, ranks))


def ids(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch["id"]]


def test_every_loop_is_one_pass() -> None:
    shard = a_shard()
    assert ids(shard.iter_batches(batch_size=10)) == list(range(LENGTH))
    assert ids(shard.iter_batches(batch_size=20)) == list(range(LENGTH))
    assert [row["id"] for row in shard.iter_rows()] == list(range(LENGTH))


def test_a_loop_that_is_left_early_has_ended_its_pass() -> None:
    shard = a_shard()
    next(iter(shard.iter_batches(batch_size=10)))
    assert ids(shard.iter_batches(batch_size=10)) == list(range(LENGTH))


def test_a_place_at_the_very_end_of_a_pass_is_not_the_beginning_of_the_next() -> None:
    shard = a_shard()
    batches = shard.iter_batches(batch_size=LENGTH)
    next(batches)
    inside = shard.state_dict()
    assert list(batches) == []
    after = shard.state_dict()
    resumed = a_shard()
    resumed.load_state_dict(inside)
    assert ids(resumed.iter_batches(batch_size=5)) == [], "the rest of the pass is nothing"
    assert ids(resumed.iter_batches(batch_size=5)) == list(range(LENGTH))
    resumed.load_state_dict(after)
    assert ids(resumed.iter_batches(batch_size=5)) == list(range(LENGTH))


def test_two_loops_at_once_are_refused() -> None:
    shard = a_shard()
    first = shard.iter_batches(batch_size=5)
    next(first)
    next(shard.iter_batches(batch_size=5))
    with pytest.raises(everstep.data.DataError, match="one loop at a time"):
        next(first)


def test_a_place_is_small_and_of_one_data_set_only() -> None:
    shard = a_shard()
    next(shard.iter_batches(batch_size=5))
    state = json.loads(json.dumps(shard.state_dict()))
    assert len(json.dumps(state)) <= 256
    with pytest.raises(ResumeRefusedError, match="data set 'train' isn't the one"):
        a_shard(source=numpy.arange(9)).load_state_dict(state)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
        ({"batch_format": "pandas"}, "batch_format"),
        ({"local_shuffle_buffer_size": 10}, "Stream"),
    ],
)
def test_what_can_not_be_had_is_refused_with_a_remedy(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        next(a_shard().iter_batches(**asked))


@pytest.mark.parametrize("given", [[1, 2], {"train": iter([1])}, {"train": []}, {1: ROWS}])
def test_what_is_no_data_set_is_refused_before_anything_starts(given: Any) -> None:
    with pytest.raises(ConfigError, match="datasets"):
        Trainer(lambda: None, datasets=given)


def test_a_refusal_names_the_data_set_and_does_not_print_it() -> None:
    class Rows:
        def __repr__(self) -> str:
            return "a thousand rows"

    with pytest.raises(ConfigError) as caught:
        Trainer(lambda: None, datasets={"train": Rows()})
    assert "datasets['train'] is a Rows" in str(caught.value)
    assert "a thousand rows" not in str(caught.value)


def test_fewer_samples_than_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 samples for 4 workers"):
        a_shard(0, 4, ROWS[:3]).iter_batches()
