"""What is found in storage when nobody is left to ask."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import msgspec
import pytest

from everstep.config import CheckpointConfig
from everstep.driver.deletions import Deletions
from everstep.driver.repair import Repair
from everstep.driver.scores import no_longer_kept
from everstep.errors import StorageError
from everstep.journal import records
from everstep.journal.history import History
from everstep.journal.journal import Journal
from everstep.process.clock import MachineClock
from everstep.storage import attempts, checkpoints, restore
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.folder import FolderStore
from everstep.storage.store import FileRecord, Store, open_store
from storage import blocking


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


def bring(run: Store, folder: str, rank: int, *, index: int, ranks: int = 2, epoch: int = 1) -> bytes:
    source = Path(run.address()).parent / f"{folder}-{rank}"
    source.mkdir()
    (source / f"shard-{rank}").write_text(f"{folder} {rank}")
    metrics = msgspec.msgpack.encode({"loss": float(index)}) if rank == 0 else b""
    share = checkpoints.Share(folder, rank, epoch, index, 0, 0, ranks, metrics)
    return checkpoints.upload_part(run, share, source).record


def commit(run: Store, history: History, folder: str, index: int) -> None:
    parts = [bring(run, folder, rank, index=index) for rank in range(2)]
    blocking.commit(run, folder, 1, index, parts)
    history.apply(records.Committed(0.0, folder, 1, index, msgspec.Raw(msgspec.msgpack.encode({})), None))


def tidy(run: Store, history: History, *, journal_is_whole: bool = True) -> list[str]:
    said: list[str] = []
    store = ImmediateStore(run)
    deletions = Deletions(store, Journal(store.child("journal"), 1, 1, []), history)
    repair = Repair(store, history, deletions, history.apply, said.append, MachineClock())
    complete(repair.put_in_order(journal_is_whole=journal_is_whole))
    return said


def test_what_every_rank_brought_a_part_of_is_committed(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    for rank in range(2):
        bring(run, "checkpoint_0001_000006", rank, index=6)
    assert tidy(run, history) == [
        "checkpoint checkpoint_0001_000006 is whole, and is one of the run's from now on"
    ]
    assert history.newest is not None
    assert history.newest.ref.index == 6
    assert history.newest.metrics == {"loss": 6.0}
    assert [msgspec.msgpack.decode(row) for row in history.metrics] == [{"loss": 6.0}]
    assert restore.verify(run.child("checkpoint_0001_000006")).ranks == [0, 1]


def test_what_is_committed_by_its_parts_comes_after_what_was_committed_before(run: Store) -> None:
    history = History()
    for index in (3, 4):
        folder = f"checkpoint_0001_{index:06d}"
        parts = [bring(run, folder, rank, index=index) for rank in range(2)]
        blocking.commit(run, folder, 1, index, parts)
        raw = msgspec.Raw(msgspec.msgpack.encode({}))
        history.apply(records.Committed(0.0, folder, 1, index, raw, None, order=index))
    for index in (11, 6):
        for rank in range(2):
            bring(run, f"checkpoint_0001_{index:06d}", rank, index=index)
    tidy(run, history)
    assert [kept.ref.index for kept in history.in_order()] == [3, 4, 6, 11]
    assert no_longer_kept(history, CheckpointConfig(num_to_keep=2)) == [
        "checkpoint_0001_000003",
        "checkpoint_0001_000004",
    ]


def test_no_attempts_number_is_used_twice_also_where_folders_have_names_of_the_users(run: Store) -> None:
    assert checkpoints.claim_name(run, "best", "e7", 1, 0) == "best"
    bring(run, "best", 0, index=1, epoch=7)
    history = History()
    tidy(run, history, journal_is_whole=False)
    assert history.last_epoch == 7


def test_no_incarnations_number_is_used_twice_also_where_nothing_is_left_of_it(run: Store) -> None:
    store, history = ImmediateStore(run), History()
    complete(attempts.note(store, 3, ((0, 0), (1, 0))))
    complete(attempts.note(store, 2, ((0, 5),)))
    complete(attempts.note(store, 3, ((1, 12),)))
    run.create("checkpoint_0003_000004_g002.007/shard", b"")
    tidy(run, history, journal_is_whole=False)
    assert history.last_epoch == 3
    assert history.begun == {(2, 0): 5, (3, 1): 12, (3, 2): 7}
    assert blocking.list_folders(run) == ["checkpoint_0003_000004_g002.007"]


def test_what_a_rank_is_missing_from_is_garbage(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    bring(run, "checkpoint_0001_000006", 0, index=6)
    assert tidy(run, history) == []
    assert blocking.list_folders(run) == ["checkpoint_0001_000003"]


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_a_part_record_never_makes_a_checkpoint_garbage(tmp_path: Path, bit: int) -> None:
    folder = "checkpoint_0001_000006"
    (tmp_path / "sized").mkdir()
    size = len(bring(open_store(tmp_path / "sized" / "run"), folder, 1, index=6))
    for place in range(bit, size, 8):
        (tmp_path / str(place)).mkdir()
        run, history = open_store(tmp_path / str(place) / "run"), History()
        commit(run, history, "checkpoint_0001_000003", 3)
        for rank in range(2):
            bring(run, folder, rank, index=6)
        part = Path(run.address(f"{folder}/{checkpoints.PARTS}/rank-00001.json"))
        data = bytearray(part.read_bytes())
        data[place] ^= 1 << bit
        part.write_bytes(data)
        tidy(run, history)
        assert run.read(f"{folder}/shard-1") == f"{folder} 1".encode(), f"{bytes(data)!r}"
        assert history.newest is not None
        restore.verify(run.child(history.newest.ref.folder))


def test_what_is_older_than_the_newest_was_let_go_of_and_does_not_come_back(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000006", 6)
    for rank in range(2):
        bring(run, "checkpoint_0001_000003", rank, index=3)
    assert tidy(run, history) == []
    assert list(history.checkpoints) == ["checkpoint_0001_000006"]
    assert blocking.list_folders(run) == ["checkpoint_0001_000006"]


def test_a_damaged_one_that_is_whole_by_its_parts_gives_way_to_the_one_before(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    for rank in range(2):
        bring(run, "checkpoint_0001_000006", rank, index=6)
    (Path(run.address()) / "checkpoint_0001_000006" / "shard-1").write_text("changed")
    assert "shard-1" in tidy(run, history)[-1]
    assert history.newest is not None
    assert history.newest.ref.index == 3


NEWEST = "checkpoint_0001_000006"


def committed_by_rank_0_alone(run: Store, folder: str = NEWEST, index: int = 6) -> None:
    blocking.commit(run, folder, 1, index, [bring(run, folder, 0, index=index, ranks=4)])


def test_a_checkpoint_that_is_gone_takes_no_place_of_one_that_is_there(run: Store) -> None:
    """An old journal was put back, which lists what retention has removed since."""
    history = History()
    for index in (3, 6, 9):
        commit(run, history, f"checkpoint_0001_{index:06d}", index)
    for index in (3, 6):
        blocking.discard(run, f"checkpoint_0001_{index:06d}")
    assert sum("is gone" in line for line in tidy(run, history)) == 2
    assert [kept.ref.index for kept in history.in_order()] == [9]


def test_a_manifest_is_a_commit_whoever_else_saved_nothing(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    committed_by_rank_0_alone(run)
    committed_by_rank_0_alone(run, "checkpoint_0001_000002", 2)
    tidy(run, history)
    assert history.newest is not None
    assert history.newest.ref.folder == NEWEST
    assert len(history.checkpoints) == 3


def test_a_folder_that_was_given_up_stays_given_up_also_if_it_has_a_manifest(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    committed_by_rank_0_alone(run)
    history.apply(records.Deleted(0.0, NEWEST))
    tidy(run, history)
    assert list(history.checkpoints) == ["checkpoint_0001_000003"]
    assert blocking.list_folders(run) == ["checkpoint_0001_000003"]


def test_nothing_is_garbage_while_the_journal_is_damaged(run: Store) -> None:
    history = History()
    bring(run, NEWEST, 0, index=6)
    tidy(run, history, journal_is_whole=False)
    assert blocking.list_folders(run) == [NEWEST]
    assert history.last_epoch == 1, "its attempt's number is not used again"


def test_the_manifests_alone_bring_back_a_runs_list_of_checkpoints(run: Store) -> None:
    for index in (3, 6, 9):
        commit(run, History(), f"checkpoint_0001_{index:06d}", index)
    history = History()
    tidy(run, history, journal_is_whole=False)
    assert [kept.ref.index for kept in history.checkpoints.values()] == [3, 6, 9]
    assert [kept.metrics for kept in history.checkpoints.values()] == [
        {"loss": 3.0},
        {"loss": 6.0},
        {"loss": 9.0},
    ]


@pytest.mark.parametrize("known", [True, False])
def test_a_manifest_that_can_not_be_read_costs_that_checkpoint_only(run: Store, known: bool) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    commit(run, history if known else History(), NEWEST, 6)
    manifest = Path(run.address(NEWEST)) / ".manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert any(".manifest.json can't be read" in line for line in tidy(run, history))
    assert history.newest is not None
    assert history.newest.ref.index == 3
    assert NEWEST in blocking.list_folders(run), "it is left for the user to look at"


def test_a_checkpoint_that_the_disk_can_not_read_is_passed_over_and_used_again_later(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    commit(run, history, NEWEST, 6)
    real = FolderStore.digest

    def fails(self: FolderStore, key: str) -> object:
        if NEWEST in str(self.root):
            raise StorageError(f"{key}: {os.strerror(5)}", "look at the disk, or use another")
        return real(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "digest", fails)
        assert any("Input/output error" in line for line in tidy(run, history))
        assert history.newest is not None
        assert history.newest.ref.index == 3
    tidy(run, history)
    assert history.newest.ref.index == 6


@pytest.mark.parametrize("what", [checkpoints.MANIFEST, "rank-00001.json"])
def test_what_the_disk_can_not_read_of_a_checkpoint_that_nobody_knows_holds_no_resume_up(
    run: Store, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    parts = [bring(run, NEWEST, rank, index=6) for rank in range(2)]
    if what == checkpoints.MANIFEST:
        blocking.commit(run, NEWEST, 1, 6, parts)
    real = FolderStore.read

    def fails(self: FolderStore, key: str) -> bytes | None:
        if key.startswith(NEWEST) and key.endswith(what):
            raise StorageError(f"{key}: {os.strerror(5)}", "look at the disk, or use another")
        return real(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "read", fails)
        assert any("Input/output error" in line for line in tidy(run, history))
        assert history.newest is not None
        assert history.newest.ref.index == 3
    tidy(run, history)
    assert history.newest.ref.index == 6, "nothing was removed, and now it can be read"


def test_one_flipped_bit_does_not_make_a_checkpoint_look_like_a_newer_versions(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    commit(run, History(), NEWEST, 6)
    manifest = Path(run.address(NEWEST)) / checkpoints.MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"format":3', b'"format":7'))
    assert any("was changed after it was written" in line for line in tidy(run, history))
    assert history.newest is not None
    assert history.newest.ref.index == 3


def test_a_run_does_not_begin_again_because_its_disk_can_not_be_read(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)

    def fails(self: FolderStore, key: str) -> object:
        raise StorageError(os.strerror(5))

    monkeypatch.setattr(FolderStore, "digest", fails)
    with pytest.raises(StorageError, match="Input/output error"):
        tidy(run, history)


def test_what_an_earlier_driver_did_not_get_to_remove_is_removed(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    commit(run, history, NEWEST, 6)
    history.apply(records.Deleted(0.0, "checkpoint_0001_000003"))
    tidy(run, history)
    assert blocking.list_folders(run) == [NEWEST]


@pytest.mark.parametrize("given_up", [True, False])
def test_what_can_not_be_removed_holds_no_resume_up(
    run: Store, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    history = History()
    bring(run, "checkpoint_0001_000003", 0, index=3)
    commit(run, history, NEWEST, 6)
    if given_up:
        history.apply(records.Deleted(0.0, "checkpoint_0001_000003"))

    def busy(self: FolderStore, key: str, data: bytes = b"") -> bool:
        raise StorageError(os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "clear" if given_up else "create", busy)
        assert any("can't be removed" in line for line in tidy(run, history))
    tidy(run, history)
    assert blocking.list_folders(run) == [NEWEST]


def test_a_manifest_with_fewer_files_than_were_saved_is_damaged(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    commit(run, history, NEWEST, 6)
    manifest = Path(run.address(NEWEST)) / ".manifest.json"
    data = json.loads(manifest.read_bytes())
    del data["files"][0]
    manifest.write_text(json.dumps(data))
    tidy(run, history)
    assert history.newest is not None
    assert history.newest.ref.index == 3


def test_a_folder_that_was_made_void_without_a_record_of_it_is_given_up(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    for rank in range(2):
        bring(run, "checkpoint_0001_000006", rank, index=6)
    assert complete(checkpoints.make_void(ImmediateStore(run), "checkpoint_0001_000006"))
    tidy(run, history)
    assert blocking.list_folders(run) == ["checkpoint_0001_000003"]
    assert "checkpoint_0001_000006" in history.deleted


def test_a_row_that_is_known_is_not_added_again_also_if_older_epochs_bring_some(run: Store) -> None:
    history = History()
    rows = [msgspec.Raw(msgspec.msgpack.encode({"loss": 6.0}))]
    history.apply(records.Metrics(2, 6, rows))
    for folder, epoch, index in (("checkpoint_0001_000003", 1, 3), ("checkpoint_0002_000006", 2, 6)):
        parts = [bring(run, folder, rank, index=index, epoch=epoch) for rank in range(2)]
        blocking.commit(run, folder, epoch, index, parts)
    tidy(run, history)
    assert len(history.metrics) == len({bytes(row) for row in history.metrics})


# ---------------------------------------------------------------------- what others put there


def test_a_checkpoint_in_whose_place_somebody_put_a_file_keeps_no_run_from_starting(
    run: Store, tmp_path: Path
) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    commit(run, history, "checkpoint_0001_000006", 6)
    run.clear("checkpoint_0001_000006")
    (tmp_path / "run" / "checkpoint_0001_000006").write_text("I needed the space")
    assert tidy(run, history) == [
        "checkpoint checkpoint_0001_000006 is gone, and nothing says why: it is left out"
    ]
    assert [*history.checkpoints] == ["checkpoint_0001_000003"]


def test_a_socket_that_a_reader_left_in_a_checkpoint_is_no_reason_to_give_it_up(
    run: Store, tmp_path: Path
) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    os.mkfifo(tmp_path / "run" / "checkpoint_0001_000003" / "viewer.pipe")
    assert tidy(run, history) == []
    assert [*history.checkpoints] == ["checkpoint_0001_000003"]
    with restore.borrow(run.child("checkpoint_0001_000003"), tmp_path / "cache"):
        pass
    with restore.borrow(run.child("checkpoint_0001_000003"), tmp_path / "cache") as place:
        assert (place / "shard-0").exists()


# ---------------------------------------------------------------------- lists that lag behind


def lag(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """What was just written is missing from lists, and can be read."""
    list_now = FolderStore.list

    def listed(self: FolderStore, prefix: str = "", after: str = "") -> list[FileRecord]:
        return [f for f in list_now(self, prefix, after) if hidden not in self.address(f.path)]

    monkeypatch.setattr(FolderStore, "list", listed)


@pytest.mark.parametrize("hidden", ["shard-", "rank-00001", "rank-00000"])
def test_a_checkpoint_of_which_a_list_lacks_what_was_just_uploaded_is_committed(
    run: Store, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    for rank in range(2):
        bring(run, "checkpoint_0001_000006", rank, index=6)
    lag(monkeypatch, hidden)
    tidy(run, history)
    assert history.newest is not None
    assert history.newest.ref.index == 6


def test_a_checkpoint_whose_files_a_list_lacks_is_not_taken_for_damaged(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    commit(run, history, "checkpoint_0001_000006", 6)
    lag(monkeypatch, "checkpoint_0001_000006")
    tidy(run, history)
    assert history.damaged == {}
    assert [*history.checkpoints] == ["checkpoint_0001_000003", "checkpoint_0001_000006"]


def test_an_attempt_that_was_noted_has_begun_also_if_a_list_lacks_it(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for epoch in (1, 2, 3, 4):
        complete(attempts.note(ImmediateStore(run), epoch))
    for hidden, known in ((".e", 0), (".e3", 0), (".e", 3), (".e1", 9)):
        with monkeypatch.context() as patch:
            lag(patch, hidden)
            history = History(last_epoch=known)
            tidy(run, history, journal_is_whole=False)
            assert history.last_epoch == max(4, known)


def test_a_file_that_is_neither_listed_nor_there_is_missing(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    commit(run, history, "checkpoint_0001_000006", 6)
    run.delete(["checkpoint_0001_000006/shard-1"])
    tidy(run, history)
    assert [*history.damaged] == ["checkpoint_0001_000006"]
