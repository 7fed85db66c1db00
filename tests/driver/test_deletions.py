"""What a run has stored is removed in one place, which asks the journal."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import everstep
from everstep.driver.deletions import Deletions
from everstep.errors import FencedError
from everstep.journal import journal, records
from everstep.journal.lease import Lease, take
from everstep.storage import checkpoints
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.store import Store, open_store
from storage import blocking

SOURCES = Path(everstep.__file__).parent
MAY_DELETE = (
    "driver/deletions.py",
    "journal/journal.py",  # its own objects, once they are in an archive
    "storage/",  # where it is said how
    "sim/",
    "kube/",  # objects of Kubernetes
)


def deletes(path: Path) -> list[int]:
    """Lines that remove something from a store: unlike those of collections, such calls have an argument."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("delete", "clear") and call.args
    ]


def test_only_one_place_deletes_what_a_run_has_stored() -> None:
    others = [
        f"{name}:{line}"
        for path in sorted(SOURCES.rglob("*.py"))
        if not (name := path.relative_to(SOURCES).as_posix()).startswith(MAY_DELETE)
        for line in deletes(path)
    ]
    assert others == []
    assert deletes(SOURCES / "driver/deletions.py")


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


def owner(run: Store, pid: int) -> Lease:
    who = records.Owner("machine", "boot", pid, 0)

    def opened(number: int) -> records.Opened:
        return records.Opened(records.FORMAT, number, who, 0.0, 0.0, "0", "run", 1, 1, "", "", "host", 15.0)

    log = ImmediateStore(run)

    class Now:
        def now(self) -> float:
            return 0.0

        def wall(self) -> float:
            return 0.0

    lease = complete(take(log, opened, Now(), print, is_gone=lambda _: True, is_over=lambda _: False))
    assert isinstance(lease, Lease)
    return lease


def deletions_of(run: Store, lease: Lease) -> Deletions:
    return Deletions(ImmediateStore(run), lease.journal, lease.history)


def give_up(lease: Lease, folder: str) -> None:
    record = records.Deleted(0.0, folder)
    lease.journal.append(record)
    lease.history.apply(record)


def test_what_the_journal_gives_up_is_removed(run: Store) -> None:
    run.create("checkpoint_0001_000001/weights", b"w")
    lease = owner(run, 1)
    give_up(lease, "checkpoint_0001_000001")
    asyncio.run(deletions_of(run, lease).remove("checkpoint_0001_000001"))
    assert not run.exists("checkpoint_0001_000001/weights")
    assert any(isinstance(record, records.Deleted) for record in journal.read(run))


def test_what_the_journal_does_not_give_up_is_not_removed(run: Store) -> None:
    run.create("checkpoint_0001_000001/weights", b"w")
    with pytest.raises(AssertionError, match="the journal doesn't say so"):
        asyncio.run(deletions_of(run, owner(run, 1)).remove("checkpoint_0001_000001"))
    assert run.exists("checkpoint_0001_000001/weights")


def test_a_driver_that_was_replaced_removes_nothing(run: Store) -> None:
    run.create("checkpoint_0001_000001/weights", b"w")
    replaced = owner(run, 1)
    give_up(replaced, "checkpoint_0001_000001")
    owner(run, 2)
    with pytest.raises(FencedError):
        asyncio.run(deletions_of(run, replaced).remove("checkpoint_0001_000001"))
    assert run.exists("checkpoint_0001_000001/weights")


def commit_elsewhere(run: Store, lease: Lease, places: Sequence[str]) -> None:
    """Checkpoints "one", "two", … that the training function has saved in these places by itself."""
    for index, (folder, place) in enumerate(zip(("one", "two"), places, strict=False), 1):
        part = checkpoints.note_external(run, checkpoints.Share(folder, 0, 1, index), place)
        blocking.commit(run, folder, 1, index, [part.record])
        raw = msgspec.Raw(msgspec.msgpack.encode({}))
        lease.history.apply(records.Committed(0.0, folder, 1, index, raw, place))


SPELLINGS = {
    "the same": "{latest}",
    "a URL": "file://{latest}",
    "with a slash": "{latest}/",
    "by another way": "{latest}/../latest",
    "a link": "{latest}-link",
    "a folder in it": "{latest}/sub",
    "the folder above": "{latest}/..",
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_files_elsewhere_that_another_checkpoint_is_made_of_stay(
    run: Store, tmp_path: Path, spelling: str
) -> None:
    """A training function may save over the same place again and again."""
    latest = tmp_path / "elsewhere" / "latest"
    (latest / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere" / "latest-link").symlink_to(latest)
    (latest / "weights").write_bytes(b"w")
    (latest / "sub" / "weights").write_bytes(b"w")
    lease = owner(run, 1)
    commit_elsewhere(run, lease, [str(latest), spelling.format(latest=latest)])
    deletions = Deletions(ImmediateStore(run), lease.journal, lease.history, delete_external=True)
    give_up(lease, "one")
    asyncio.run(deletions.remove("one"))
    assert (latest / "weights").exists()
    assert (latest / "sub" / "weights").exists()
    give_up(lease, "two")
    asyncio.run(deletions.remove("two"))
    assert not (latest / "sub" / "weights").exists()


def test_a_place_elsewhere_that_holds_the_run_is_not_removed_with_its_checkpoint(
    run: Store, tmp_path: Path
) -> None:
    lease = owner(run, 1)
    commit_elsewhere(run, lease, [str(tmp_path)])
    before = [file.path for file in run.child(journal.FOLDER).list()]
    deletions = Deletions(ImmediateStore(run), lease.journal, lease.history, delete_external=True)
    give_up(lease, "one")
    asyncio.run(deletions.remove("one"))
    assert {*before} <= {file.path for file in run.child(journal.FOLDER).list()}
