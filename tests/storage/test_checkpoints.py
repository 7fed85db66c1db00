"""Checkpoints in a store: whole or not there, and never two in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.errors import (
    ConfigError,
    ConflictingFilesError,
    ConflictingPlacesError,
    DamagedCheckpointError,
    StorageError,
)
from everstep.storage import checkpoints
from everstep.storage.bucket import PIECE
from everstep.storage.checkpoints import Manifest, Share
from everstep.storage.store import FileRecord, Store, open_store
from storage import blocking

Bring = Callable[..., bytes]


@pytest.fixture
def bring(tmp_path: Path, store: Store) -> Bring:
    """A rank brings files: the record of its part."""

    def bring(rank: int, folder: str = "c", **files: str) -> bytes:
        source = tmp_path / f"source-{folder}-{rank}"
        for name, text in files.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text)
        return checkpoints.upload_part(store, Share(folder, rank, 1, 1), source).record

    return bring


def test_a_checkpoint_exists_once_its_manifest_does(store: Store, bring: Bring) -> None:
    parts = [bring(0, a="one"), bring(1, b="two")]
    assert blocking.read_manifest(store, "c") is None
    blocking.commit(store, "c", 1, 1, parts)
    manifest = blocking.read_manifest(store, "c")
    assert manifest is not None
    assert [(f.path, f.size) for f in manifest.files] == [("a", 3), ("b", 3)]
    assert manifest.ranks == [0, 1]


def test_committing_twice_from_the_same_parts_is_once(store: Store, bring: Bring) -> None:
    parts = [bring(0, a="one"), bring(1, b="two")]
    assert blocking.commit(store, "c", 1, 1, parts) == blocking.commit(store, "c", 1, 1, parts[::-1])
    with pytest.raises(StorageError, match="committed by somebody else"):
        blocking.commit(store, "c", 2, 1, parts)


def test_a_later_driver_can_commit_from_what_is_in_storage(store: Store, bring: Bring) -> None:
    told = [bring(0, a="one"), bring(1, b="two")]
    found = blocking.read_parts(store, "c")
    assert found == told
    later = blocking.commit(store, "c", 1, 1, found)
    assert later == blocking.commit(store, "c", 1, 1, told)


def test_a_checkpoint_whose_files_are_elsewhere_is_not_committed(store: Store, bring: Bring) -> None:
    """A disk that was mounted over the run's folder, or a folder that was moved away, between a rank's upload
    and the commit.
    """
    parts = [bring(0, a="one"), bring(1, b="two", c="three")]
    store.delete(["c/c"])
    with pytest.raises(DamagedCheckpointError, match="c is missing"):
        blocking.commit(store, "c", 1, 1, parts)
    assert blocking.read_manifest(store, "c") is None
    store.replace("c/c", b"thr")
    with pytest.raises(DamagedCheckpointError, match="c has 3 bytes, 5 were saved"):
        blocking.commit(store, "c", 1, 1, parts)
    store.replace("c/c", b"three")
    assert blocking.commit(store, "c", 1, 1, parts).ranks == [0, 1]


def test_a_file_that_two_ranks_bring_alike_is_one_file(store: Store, bring: Bring) -> None:
    parts = [bring(0, a="ours"), bring(1, a="ours")]
    manifest = blocking.commit(store, "c", 1, 1, parts)
    assert manifest.files == [store.child("c").digest("a")]
    assert store.read("c/a") == b"ours"


def test_a_large_file_that_two_ranks_bring_alike_at_the_same_time_is_one_file(
    store: Store, bring: Bring
) -> None:
    text = "x" * (PIECE + 1)
    if not store.is_local:
        store.create("c/a", b"everstep: rank 0 is writing this")
    second, first = bring(1, a=text), bring(0, a=text)
    assert blocking.commit(store, "c", 1, 1, [first, second]).files == [store.child("c").digest("a")]


def test_different_files_of_one_name_are_not_committed(store: Store, bring: Bring) -> None:
    parts = [bring(0, a="mine", b="b"), bring(1, a="yours"), bring(2, c="c"), bring(3, a="theirs")]
    with pytest.raises(ConflictingFilesError, match="ranks 0, 1 and 3 saved 'a'"):
        blocking.commit(store, "c", 1, 1, parts)
    assert blocking.read_manifest(store, "c") is None


def test_a_part_that_is_brought_again_after_a_crash_is_the_same(store: Store, bring: Bring) -> None:
    assert bring(0, a="one", b="two") == bring(0, a="one", b="two")


def test_a_rank_can_not_bring_two_different_parts_of_one_checkpoint(store: Store, bring: Bring) -> None:
    bring(0, a="one")
    with pytest.raises(StorageError, match="checkpoint_dir_name"):
        bring(0, a="again")


def test_the_first_report_gets_the_name_and_later_ones_a_suffix(store: Store) -> None:
    def claim(incarnation: str, index: int, rank: int) -> str:
        return checkpoints.claim_name(store, "best", incarnation, index, rank)

    assert {claim("e1", 3, rank) for rank in range(2)} == {"best"}
    assert {claim("e1", 7, rank) for rank in range(2)} == {"best.e1.7"}
    assert {claim("e2", 3, rank) for rank in range(2)} == {"best.e2.3"}


def test_ranks_that_give_one_report_different_names_are_told(store: Store) -> None:
    checkpoints.claim_name(store, "a", "e1", 3, 0)
    with pytest.raises(ConfigError, match="checkpoint_dir_name='b' at rank 1, and 'a' at another rank"):
        checkpoints.claim_name(store, "b", "e1", 3, 1)


@pytest.mark.parametrize(
    "name", ["journal", "logs", "requests", "checkpoint_0001_000001", ".names", "", "a/b", "x\n"]
)
def test_a_name_that_can_not_be_a_checkpoints_is_refused(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint_dir_name"):
        checkpoints.claim_name(store, name, "e1", 1, 0)
    assert not store.list()


@pytest.mark.parametrize(
    "name", ["Journal", "LOGS", "requests.", "journal ", "Checkpoint_0001_000001", "ｊournal", ". ."]
)
def test_a_name_that_some_file_system_takes_for_one_of_ours_is_refused(store: Store, name: str) -> None:
    """Retention would remove the journal with it."""
    with pytest.raises(ConfigError, match="checkpoint_dir_name"):
        checkpoints.claim_name(store, name, "e1", 1, 0)
    assert not store.list()


def test_a_checkpoint_is_found_whose_name_was_taken_by_one_in_another_case(store: Store) -> None:
    """On a file system where that is the same name, "best" had been claimed as "Best" before."""
    assert checkpoints.claim_name(store, "Best", "e1", 3, 0) == "Best"
    for folder in ("Best", "best.e1.7", "another.e1.7"):
        store.create(f"{folder}/weights", b"w")
    assert blocking.list_folders(store) == ["Best", "best.e1.7"]


@pytest.mark.parametrize("letter", ["x", "ä", "🚀"])
def test_the_longest_name_there_may_be_leaves_room_for_its_suffix(store: Store, letter: str) -> None:
    longest = letter * (checkpoints.LONGEST_NAME // len(letter.encode()))
    assert checkpoints.claim_name(store, longest, "e1", 1, 0) == longest
    again = checkpoints.claim_name(store, longest, "e123456g1234.12345", 1_000_000_000, 0)
    assert again.startswith(f"{longest}.e")
    store.create(f"{again}/weights", b"x")
    with pytest.raises(
        ConfigError, match=rf"checkpoint_dir_name=.*has \d+ bytes.*at most {checkpoints.LONGEST_NAME}"
    ):
        checkpoints.claim_name(store, longest + letter, "e1", 2, 0)


def test_a_restored_checkpoint_that_is_reported_again_does_not_bring_its_old_manifest(
    tmp_path: Path,
) -> None:
    run = open_store(tmp_path / "run")
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("one")
    part = checkpoints.upload_part(run, Share("first", 0, 1, 1), source)
    blocking.commit(run, "first", 1, 1, [part.record])
    part = checkpoints.upload_part(run, Share("second", 0, 1, 2), tmp_path / "run" / "first")
    assert blocking.read_manifest(run, "second") is None
    manifest = blocking.commit(run, "second", 1, 2, [part.record])
    assert [file.path for file in manifest.files] == ["a"]


def test_folders_and_links_in_a_checkpoint_are_followed(tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "f").write_text("1")
    elsewhere.mkdir()
    (elsewhere / "g").write_text("2")
    (source / "linked").symlink_to(elsewhere)
    (source / "file").symlink_to(elsewhere / "g")
    (elsewhere / "up").symlink_to(elsewhere)
    run = open_store(tmp_path / "run")
    part = checkpoints.upload_part(run, Share("c", 0, 1, 1), source)
    manifest = blocking.commit(run, "c", 1, 1, [part.record])
    assert [file.path for file in manifest.files] == ["deep/er/f", "file", "linked/g"]


def test_a_folder_and_a_link_to_it_are_both_in_the_checkpoint(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "step-5" / "shards").mkdir(parents=True)
    (source / "step-5" / "shards" / "0").write_text("0")
    (source / "last").symlink_to("step-5")  # as frameworks leave one to the newest
    (source / "step-5" / "top").symlink_to(source)
    record = checkpoints.upload_part(store, Share("c", 0, 1, 1), source).record
    manifest = blocking.commit(store, "c", 1, 1, [record])
    assert [file.path for file in manifest.files] == ["last/shards/0", "step-5/shards/0"]


def test_what_others_uploaded_is_listed_with_sizes_and_never_deleted(store: Store, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "d").mkdir(parents=True)
    (theirs / "d" / "shard").write_text("12345")
    parts = [checkpoints.note_external(store, Share("c", 0, 1, 1), str(theirs)).record]
    (theirs / "d" / "shard").write_text("1234567")
    parts.append(checkpoints.note_external(store, Share("c", 1, 1, 1), str(theirs)).record)
    manifest = blocking.commit(store, "c", 1, 1, parts)
    assert manifest.external == str(theirs)
    assert manifest.files == [FileRecord("d/shard", 7, "")]
    blocking.discard(store, "c")
    assert (theirs / "d" / "shard").exists()


def test_ranks_that_saved_in_different_places_have_saved_no_checkpoint(
    store: Store, bring: Bring, tmp_path: Path
) -> None:
    def note(rank: int, place: str) -> bytes:
        return checkpoints.note_external(store, Share("c", rank, 1, 1), place).record

    first, second = note(0, "s3://theirs/0"), note(1, "s3://theirs/1")
    with pytest.raises(ConflictingPlacesError, match="rank 0 saved in s3://theirs/0, and rank 1 in s3://th"):
        blocking.commit(store, "c", 1, 1, [first, second])
    with pytest.raises(ConflictingPlacesError, match="rank 2 in"):
        blocking.commit(store, "c", 1, 1, [first, bring(2, a="ours")])
    own = [note(3, store.address("c")), bring(4, b="ours")]
    assert blocking.commit(store, "c", 1, 1, own).ranks == [3, 4]


def test_an_external_place_that_can_not_be_listed_is_only_noted(store: Store) -> None:
    part = checkpoints.note_external(store, Share("c", 0, 1, 1), "hdfs://cluster/x")
    manifest = blocking.commit(store, "c", 1, 1, [part.record])
    assert (manifest.external, manifest.files) == ("hdfs://cluster/x", [])


def test_discarding_takes_the_manifest_first(
    store: Store, bring: Bring, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking.commit(store, "c", 1, 1, [bring(0, a="one")])

    def broken(self: Store, prefix: str) -> None:
        raise StorageError("half-way")

    monkeypatch.setattr(type(store), "clear", broken)
    with pytest.raises(StorageError, match="half-way"):
        blocking.discard(store, "c")
    monkeypatch.undo()
    assert blocking.read_manifest(store, "c") is None
    assert store.exists("c/a")
    blocking.discard(store, "c")
    blocking.discard(store, "c")
    assert list(store.list("c")) == []


def test_the_folders_of_checkpoints_are_told_from_everything_else(store: Store, bring: Bring) -> None:
    ours = [checkpoints.folder_name(1, 1, None, 0), checkpoints.folder_name(2, 1, 3, 1)]
    for name, incarnation in [("best", "e1"), ("best", "e2"), ("last", "e1")]:
        folder = checkpoints.claim_name(store, name, incarnation, len(ours), 0)
        ours.append(folder)
        store.create(f"{folder}/weights", b"")
    for folder in ours[:2]:
        bring(0, folder, a="x")
    for theirs in ("logs/x", "journal/1", "requests/stop-1", "mine/notes", "best.png", "checkpoint_old/x"):
        store.create(theirs, b"")
    assert blocking.list_folders(store) == sorted(ours)


def test_an_entry_that_is_dropped_from_a_manifest_is_noticed(store: Store, bring: Bring) -> None:
    blocking.commit(store, "c", 1, 1, [bring(0, a="one", b="two")])
    data = json.loads(store.read("c/.manifest.json") or b"")
    del data["files"][1]
    store.replace("c/.manifest.json", json.dumps(data).encode())
    with pytest.raises(DamagedCheckpointError, match="was changed after it was written"):
        blocking.read_manifest(store, "c")


# ---------------------------------------------------------------------- formats

PART_1 = {"rank": 3, "files": [{"path": "a", "size": 1, "sha256": "ca978112"}], "external": None}
MANIFEST_1 = {
    "format": 1,
    "epoch": 2,
    "index": 7,
    "files": [{"path": "a", "size": 1, "sha256": "ca978112"}],
    "external": None,
}


def test_parts_and_manifests_of_format_1_are_read(store: Store) -> None:
    store.create("c/a", b"a")
    store.create("c/.parts/rank-00003.json", json.dumps(PART_1).encode())
    committed = blocking.commit(store, "c", 2, 7, blocking.read_parts(store, "c"))
    assert committed.ranks == [3]
    assert committed.files == [FileRecord("a", 1, "ca978112")]
    store.create("old/.manifest.json", json.dumps(MANIFEST_1).encode())
    assert blocking.read_manifest(store, "old") == Manifest(1, 2, 7, committed.files)


def test_what_format_1_committed_is_committed(store: Store) -> None:
    store.create("c/.manifest.json", json.dumps(MANIFEST_1).encode())
    assert blocking.commit(store, "c", 2, 7, [json.dumps(PART_1).encode()]).index == 7


def test_a_newer_format_is_refused_with_the_remedy(store: Store) -> None:
    newer = {**MANIFEST_1, "format": checkpoints.FORMAT + 1, "unheard": "of"}
    store.create("c/.manifest.json", json.dumps(newer).encode())
    with pytest.raises(StorageError, match="newer Everstep.*Upgrade"):
        blocking.read_manifest(store, "c")


def test_a_manifest_that_is_cut_off_is_damage(store: Store) -> None:
    store.create("c/.manifest.json", json.dumps(MANIFEST_1).encode()[:-10])
    with pytest.raises(DamagedCheckpointError, match=r"c is damaged: \.manifest\.json can't be read"):
        blocking.read_manifest(store, "c")
