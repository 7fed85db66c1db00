"""Checkpoints on disk: whole or not there, and never two in one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everstep.errors import StorageAccessError, StorageError
from everstep.storage import checkpoints as store, folder as disk


def part(tmp_path: Path, run: Path, rank: int, folder: str = "c", **files: str) -> bytes:
    source = tmp_path / f"source-{rank}"
    source.mkdir(exist_ok=True)
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    return store.upload_part(run, folder, source, rank, 1).record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    disk.make_private(path)
    return path


def test_a_checkpoint_exists_once_its_manifest_does(tmp_path: Path, run: Path) -> None:
    parts = [part(tmp_path, run, 0, a="one"), part(tmp_path, run, 1, b="two")]
    assert store.read_manifest(run, "c") is None
    store.commit(run, "c", 1, 1, parts)
    manifest = store.read_manifest(run, "c")
    assert manifest is not None
    assert [(f.path, f.size) for f in manifest.files] == [("a", 3), ("b", 3)]


def test_committing_twice_from_the_same_parts_is_once(tmp_path: Path, run: Path) -> None:
    parts = [part(tmp_path, run, 0, a="one")]
    assert store.commit(run, "c", 1, 1, parts) == store.commit(run, "c", 1, 1, parts)
    with pytest.raises(StorageError, match="committed by somebody else"):
        store.commit(run, "c", 2, 1, parts)


def test_a_file_that_two_ranks_bring_is_one_of_theirs_and_its_digest_is_right(
    tmp_path: Path, run: Path
) -> None:
    parts = [part(tmp_path, run, 0, a="mine"), part(tmp_path, run, 1, a="yours")]
    manifest = store.commit(run, "c", 1, 1, parts)
    (record,) = manifest.files
    assert (run / "c" / "a").read_text() == "mine"
    assert record.size == 4


def test_a_rank_can_not_bring_two_parts_of_one_checkpoint(tmp_path: Path, run: Path) -> None:
    part(tmp_path, run, 0, a="one")
    with pytest.raises(StorageError, match="checkpoint_dir_name"):
        part(tmp_path, run, 0, a="again")


def test_the_first_incarnation_gets_the_name_and_later_ones_a_suffix(run: Path) -> None:
    assert store.claim_name(run, "best", "e1") == "best"
    assert store.claim_name(run, "best", "e1") == "best"
    assert store.claim_name(run, "best", "e2") == "best.e2"
    assert store.claim_name(run, "best", "e2") == "best.e2"


def test_a_file_that_exists_is_never_written_over(run: Path) -> None:
    assert disk.create(run / "x", b"first")
    assert not disk.create(run / "x", b"second")
    assert (run / "x").read_bytes() == b"first"
    assert [path.name for path in run.iterdir()] == ["x"]


def test_folders_are_the_users_alone_also_those_in_between(tmp_path: Path) -> None:
    disk.make_private(tmp_path / "a" / "b" / "c")
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o700


def test_a_path_below_a_file_is_refused_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageAccessError, match="can't be written"):
        disk.check_writable(tmp_path / "file" / "below")
