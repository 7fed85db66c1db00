"""A checkpoint is a folder of its own: no run goes with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import ConfigError
from everstep.storage.restore import default_cache
from everstep.storage.sources import check_source
from everstep.storage.store import Store, open_store


def make_run(folder: Path) -> Store:
    store = open_store(folder)
    store.create("journal/0000000001", b"opened")
    store.create("checkpoint_0001_000001/weights", b"w")
    return store


def test_a_folder_of_its_own_may_be_reported_and_removed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "run")
    mine = tmp_path / "mine"
    mine.mkdir()
    check_source(mine, run, delete=True)


@pytest.mark.parametrize("place", ["runs/run", "runs", ".", "others/far/other", "others/far", "others"])
def test_a_folder_that_is_or_holds_a_run_is_refused(tmp_path: Path, place: str) -> None:
    run = make_run(tmp_path / "runs" / "run")
    make_run(tmp_path / "others" / "far" / "other")
    with pytest.raises(ConfigError, match="is the folder of a run") as caught:
        check_source(tmp_path / place, run, delete=False)
    assert caught.value.field == "checkpoint"


def test_a_checkpoint_of_a_run_may_be_reported_again_and_not_be_removed_by_that(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "run")
    committed = tmp_path / "runs" / "run" / "checkpoint_0001_000001"
    check_source(committed, run, delete=False)
    with pytest.raises(ConfigError, match="belongs to the run") as caught:
        check_source(committed, run, delete=True)
    assert caught.value.field == "delete_local_checkpoint_after_upload"


def test_a_link_to_a_run_is_that_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    with pytest.raises(ConfigError, match="is the folder of a run"):
        check_source(tmp_path / "link", run, delete=False)


def test_the_copy_of_a_remote_checkpoint_that_workers_share_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "runs" / "run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = default_cache() / "a-copy"
    copy.mkdir(parents=True)
    check_source(copy, run, delete=False)
    for place in (copy, tmp_path / "cache"):
        with pytest.raises(ConfigError, match="workers of this host share") as caught:
            check_source(place, run, delete=True)
        assert caught.value.field == "delete_local_checkpoint_after_upload"
