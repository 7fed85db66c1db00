"""Checkpoints as folders, their metadata, and results."""

from __future__ import annotations

import json
import math
import os
import pickle
import sys

import pytest

from everstep import (
    Checkpoint,
    CheckpointUploadMode,
    ConfigError,
    RefusedError,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    Result,
    StorageError,
)
from everstep.errors import RefusedAttributeError


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "source"
    (source / "shards").mkdir(parents=True)
    (source / "model.bin").write_bytes(b"weights")
    (source / "shards" / "0").write_text("zero")
    return source


def test_as_directory_gives_the_folder_itself(folder):
    with Checkpoint.from_directory(folder).as_directory() as given:
        assert given == str(folder)
    assert (folder / "model.bin").exists()


def test_to_directory_copies_into_a_folder_that_is_made(folder, tmp_path):
    target = tmp_path / "a" / "b"
    assert Checkpoint(folder).to_directory(target) == str(target)
    assert (target / "shards" / "0").read_text() == "zero"


def test_to_directory_adds_to_a_folder_that_is_there(folder, tmp_path):
    (tmp_path / "other").write_text("kept")
    Checkpoint(folder).to_directory(tmp_path)
    assert (tmp_path / "other").read_text() == "kept"
    assert (tmp_path / "model.bin").read_bytes() == b"weights"


def test_to_directory_without_a_path_makes_a_new_one_each_time(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    checkpoint = Checkpoint(folder)
    first, second = checkpoint.to_directory(), checkpoint.to_directory()
    assert first != second
    assert sorted(os.listdir(first)) == sorted(os.listdir(second)) == ["model.bin", "shards"]


def test_a_checkpoint_is_not_copied_into_itself(folder):
    assert Checkpoint(folder).to_directory(folder) == str(folder)
    with pytest.raises(ConfigError, match="into itself"):
        Checkpoint(folder).to_directory(folder / "shards")


def test_a_folder_that_is_not_there_is_named_when_it_is_read(tmp_path):
    checkpoint = Checkpoint(tmp_path / "gone")
    with pytest.raises(StorageError, match="gone"), checkpoint.as_directory():
        pass
    with pytest.raises(StorageError, match="gone"):
        checkpoint.get_metadata()


def test_metadata_is_a_plain_json_file_in_the_folder(folder):
    checkpoint = Checkpoint(folder)
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"step": 1, "tags": ["a"]})
    assert json.loads((folder / ".metadata.json").read_text()) == {"step": 1, "tags": ["a"]}
    checkpoint.update_metadata({"step": 2})
    assert Checkpoint(folder).get_metadata() == {"step": 2, "tags": ["a"]}
    checkpoint.set_metadata({})
    assert checkpoint.get_metadata() == {}
    assert sorted(os.listdir(folder)) == [".metadata.json", "model.bin", "shards"]


def test_metadata_that_is_not_json_is_refused_and_changes_nothing(folder):
    checkpoint = Checkpoint(folder)
    checkpoint.set_metadata({"step": 1})
    with pytest.raises(ConfigError, match="isn't JSON"):
        checkpoint.set_metadata({"model": object()})
    assert checkpoint.get_metadata() == {"step": 1}


def test_metadata_that_is_not_json_raises_what_ray_train_raises(folder):
    with pytest.raises(TypeError, match="isn't JSON"):
        Checkpoint(folder).set_metadata({"model": object()})
    with pytest.raises(TypeError, match="isn't JSON"):
        Checkpoint(folder).update_metadata({"model": object()})


def test_the_result_of_a_folder_that_is_not_there_raises_what_ray_train_raises(tmp_path):
    with pytest.raises(RuntimeError, match="there is no such folder"):
        Result.from_path(tmp_path / "gone")
    with pytest.raises(RuntimeError, match="it has no journal"):
        Result.from_path(tmp_path)


def test_a_damaged_metadata_file_is_named(folder):
    (folder / ".metadata.json").write_text("{")
    with pytest.raises(StorageError, match=r"\.metadata\.json is not JSON"):
        Checkpoint(folder).get_metadata()


def test_checkpoints_are_values(folder, tmp_path, monkeypatch):
    checkpoint = Checkpoint(folder)
    assert checkpoint == Checkpoint(str(folder) + "/") == pickle.loads(pickle.dumps(checkpoint))
    assert checkpoint == Checkpoint(f"file://{folder}")
    assert len({checkpoint, Checkpoint(folder), Checkpoint(tmp_path)}) == 2
    assert checkpoint != str(folder)
    assert repr(checkpoint) == f"Checkpoint(path={str(folder)!r})"
    monkeypatch.chdir(tmp_path)
    relative = Checkpoint("source")
    monkeypatch.chdir("/")
    assert relative == checkpoint


def test_a_checkpoint_at_a_uri_can_be_passed_around():
    checkpoint = pickle.loads(pickle.dumps(Checkpoint("s3://bucket/run/checkpoint_1/")))
    assert checkpoint.path == "s3://bucket/run/checkpoint_1"
    with pytest.raises(ConfigError, match="got a URI"):
        Checkpoint.from_directory("s3://bucket/x")


def test_a_checkpoint_is_not_a_path(folder):
    with pytest.raises(TypeError, match="as_directory"):
        os.fspath(Checkpoint(folder))
    with pytest.raises(ConfigError, match="folder or a URI"):
        Checkpoint("")


def test_filesystems_are_refused(folder):
    with pytest.raises(RefusedError, match="pyarrow"):
        Checkpoint(folder, filesystem=object())
    with pytest.raises(RefusedAttributeError, match="as_directory"):
        _ = Checkpoint(folder).filesystem
    assert not hasattr(Checkpoint(folder), "filesystem")


def test_only_async_uploads_delete_the_local_copy_by_default():
    deletes = [mode for mode in CheckpointUploadMode if mode.default_delete_local_checkpoint_after_upload()]
    assert deletes == [CheckpointUploadMode.ASYNC]


def test_a_reported_checkpoint_is_committed(folder):
    assert ReportedCheckpoint(Checkpoint(folder), {}).status is ReportedCheckpointStatus.COMMITTED


def result_of(*scores: object) -> Result:
    kept = [(Checkpoint(f"/c/{i}"), {"loss": score, "eval": {"acc": i}}) for i, score in enumerate(scores)]
    return Result(
        metrics=kept[-1][1] if kept else None,
        checkpoint=kept[-1][0] if kept else None,
        error=None,
        path="/run",
        best_checkpoints=kept,
        metrics_history=[metrics for _, metrics in kept],
    )


def test_the_best_checkpoint_is_found_by_a_metric():
    result = result_of(3.0, 1.0, 2.0)
    assert result.get_best_checkpoint("loss", "min") == Checkpoint("/c/1")
    assert result.get_best_checkpoint("loss", "max") == Checkpoint("/c/0")
    assert result.get_best_checkpoint("eval/acc", "max") == Checkpoint("/c/2")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_the_best(mode):
    assert result_of(math.nan, 5.0, math.nan).get_best_checkpoint("loss", mode) == Checkpoint("/c/1")


def test_checkpoints_without_the_metric_do_not_count():
    assert result_of(None, 5.0, "broken").get_best_checkpoint("loss", "max") == Checkpoint("/c/1")


def test_asking_for_the_best_in_vain_says_why():
    with pytest.raises(ConfigError, match="'max' or 'min'"):
        result_of(1.0).get_best_checkpoint("loss", "best")
    with pytest.raises(RuntimeError, match="'acc'.*eval, loss"):
        result_of(1.0).get_best_checkpoint("acc", "max")
    with pytest.raises(RuntimeError, match="no checkpoint"):
        result_of().get_best_checkpoint("loss", "max")


def test_the_history_is_a_dataframe_where_pandas_is_installed():
    pytest.importorskip("pandas")
    frame = result_of(3.0, 1.0).metrics_dataframe
    assert list(frame["loss"]) == [3.0, 1.0]
    assert result_of().metrics_dataframe is None


def test_without_pandas_the_error_names_the_history(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="metrics_history"):
        _ = result_of(1.0).metrics_dataframe


def test_what_a_result_does_not_have_says_what_to_use():
    with pytest.raises(RefusedAttributeError, match="train_loop_config"):
        _ = result_of().config
    with pytest.raises(RefusedAttributeError, match=r"Result\.path"):
        _ = result_of().filesystem
    with pytest.raises(RefusedError, match="pyarrow"):
        Result.from_path("/run", storage_filesystem=object())
