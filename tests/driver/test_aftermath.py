"""What is found in storage when nobody is left to ask."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.driver import journal
from everstep.driver.aftermath import put_in_order
from everstep.driver.history import History
from everstep.storage import checkpoints, restore
from everstep.storage.store import Store, open_store


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
    checkpoints.commit(run, folder, 1, index, parts)
    history.apply(journal.Committed(0.0, folder, 1, index, msgspec.Raw(msgspec.msgpack.encode({})), None))


def tidy(run: Store, history: History) -> list[str]:
    said: list[str] = []
    put_in_order(run, history, history.apply, said.append)
    return said


def test_what_every_rank_brought_a_part_of_is_committed(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    for rank in range(2):
        bring(run, "checkpoint_0001_000006", rank, index=6)
    assert tidy(run, history) == ["checkpoint checkpoint_0001_000006 is whole, and is committed now"]
    assert history.newest is not None
    assert history.newest.ref.index == 6
    assert history.newest.metrics == {"loss": 6.0}
    assert restore.verify(run.child("checkpoint_0001_000006")).ranks == [0, 1]


def test_what_a_rank_is_missing_from_is_garbage(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    bring(run, "checkpoint_0001_000006", 0, index=6)
    assert tidy(run, history) == []
    assert checkpoints.list_folders(run) == ["checkpoint_0001_000003"]


def test_what_is_older_than_the_newest_was_let_go_of_and_does_not_come_back(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000006", 6)
    for rank in range(2):
        bring(run, "checkpoint_0001_000003", rank, index=3)
    assert tidy(run, history) == []
    assert list(history.checkpoints) == ["checkpoint_0001_000006"]
    assert checkpoints.list_folders(run) == ["checkpoint_0001_000006"]


def test_a_damaged_one_that_is_whole_by_its_parts_gives_way_to_the_one_before(run: Store) -> None:
    history = History()
    commit(run, history, "checkpoint_0001_000003", 3)
    for rank in range(2):
        bring(run, "checkpoint_0001_000006", rank, index=6)
    (Path(run.address()) / "checkpoint_0001_000006" / "shard-1").write_text("changed")
    assert "shard-1" in tidy(run, history)[-1]
    assert history.newest is not None
    assert history.newest.ref.index == 3
