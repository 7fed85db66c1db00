"""The journal: numbered objects that are made once, a lease that is a record in it, and nothing forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.errors import FencedError, JournalFormatError, RunOwnedError, StorageError
from everstep.journal import journal, lease, records
from everstep.journal.history import History, read_history
from everstep.journal.journal import Journal
from everstep.journal.lease import Lease
from everstep.journal.records import Opened, Owner
from everstep.process.clock import MachineClock
from everstep.storage.asynchronous import ImmediateStore, ThreadedStore, complete
from everstep.storage.folder import FolderStore
from everstep.storage.shared import leave_marker
from everstep.storage.store import FileRecord, Limits, Store, open_store

DEAD = Owner("elsewhere", "another boot", 1, 1)


def opened(number: int, owner: Owner | None = None, nonce: str = "n", ttl_s: float = 0.05) -> Opened:
    owner = owner or records.this_process()
    return Opened(records.FORMAT, number, owner, 0.0, 0.0, "0", "run", 1, 1, "code", "config", nonce, ttl_s)


def take(run: Store, ttl_s: float = 0.05, owner: Owner | None = None, **more: Any) -> Lease:
    """A lease whose journal blocks, for tests without an event loop."""
    say = more.pop("say", lambda line: None)
    store = ImmediateStore(run)
    taken = lease.take(store, lambda n: opened(n, owner, ttl_s=ttl_s), MachineClock(), say, **more)
    found = asyncio.run(taken)
    assert isinstance(found, Lease)
    return found


def flush(log: Journal) -> bool:
    return complete(log.flush())


def compact(log: Journal) -> None:
    complete(log.compact())


def scan(run: Store) -> journal.Scan:
    return complete(journal.scan_journal(ImmediateStore(run.child(journal.FOLDER))))


def write(log: Journal, count: int, epoch: int = 1, first: int = 1) -> None:
    for n in range(first, first + count):
        raw = msgspec.Raw(msgspec.msgpack.encode({"n": n}))
        log.append(records.Metrics(epoch, n, [raw]))
        log.append(records.Committed(0.0, f"c{epoch}-{n}", epoch, n, raw, None))
        flush(log)


def rows(run: Store) -> list[int]:
    return [msgspec.msgpack.decode(row)["n"] for row in read_history(run).metrics]


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def test_what_is_written_is_read_back_in_order(run: Store) -> None:
    write(take(run).journal, 5)
    history = read_history(run)
    assert history.lease == 1
    assert list(history.checkpoints) == [f"c1-{n}" for n in range(1, 6)]
    assert rows(run) == [1, 2, 3, 4, 5]


def test_what_is_appended_while_something_is_written_is_written_next(run: Store) -> None:
    log = take(run).journal
    done = threading.Event()

    def keep_flushing() -> None:
        while not done.is_set():
            flush(log)
        flush(log)

    flusher = threading.Thread(target=keep_flushing)
    flusher.start()
    for n in range(20_000):
        log.append(records.Deleted(0.0, str(n)))
    done.set()
    flusher.join()
    assert [r.folder for r in journal.read(run) if isinstance(r, records.Deleted)] == [
        str(n) for n in range(20_000)
    ]


# ---------------------------------------------------------------------- one owner


def test_a_record_that_is_another_drivers_by_the_time_of_the_answer_gives_no_lease(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = FolderStore.create

    def answered_late(store: FolderStore, key: str, data: bytes) -> bool:
        created = create(store, key, data)
        monkeypatch.undo()
        store.delete([key])
        create(store, key, records.encode(opened(1, DEAD, nonce="another")))
        return created

    monkeypatch.setattr(FolderStore, "create", answered_late)
    taken = take(run)
    assert taken.number == 2
    assert taken.before is not None
    assert taken.before.nonce == "another"


def test_a_driver_that_was_replaced_collides_at_its_next_append_and_is_told_by_whom(run: Store) -> None:
    old = take(run, owner=DEAD).journal
    new = take(run).journal
    old.append(records.Deleted(0.0, "something"))
    with pytest.raises(FencedError, match=str(records.this_process())):
        flush(old)
    write(new, 1)
    with pytest.raises(FencedError):
        flush(old)
    assert not any(isinstance(r, records.Deleted) for r in journal.read(run))
    assert read_history(run).lease == 2


def test_a_driver_that_was_replaced_stays_so_also_if_it_never_finds_out_by_whom(run: Store) -> None:
    class Stalling(ImmediateStore):
        async def read(self, key: str) -> bytes | None:
            await asyncio.Event().wait()
            return None

    take(run, owner=DEAD)
    take(run)
    log = run.child(journal.FOLDER)
    there = [file.path for file in log.list()]
    old = Journal(Stalling(log), 2, 1, [])
    old.append(records.Deleted(0.0, "something"))

    async def look() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await old.flush()
        with pytest.raises(FencedError):
            await old.start_anew([])
        with pytest.raises(FencedError):
            await old.flush()

    asyncio.run(look())
    assert [file.path for file in log.list()] == there


def test_of_two_leases_with_one_number_the_later_has_precedence(run: Store) -> None:
    """The record by which the run was taken is lost, and its driver lives."""

    def taken(wall: float) -> Lease:
        store = ImmediateStore(run)
        opening = msgspec.structs.replace(opened(1, owner=DEAD), wall=wall)
        found = asyncio.run(lease.take(store, lambda n: opening, MachineClock(), lambda line: None))
        assert isinstance(found, Lease)
        return found

    first = taken(1_800_000_000.0)
    run.delete([f"{journal.FOLDER}/{journal.key_of(1)}"])
    second = taken(1_800_000_020.0)
    assert first.number == second.number
    assert first.precedence < second.precedence
    assert take(run).precedence > second.precedence


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lease_whose_record_is_lost_is_not_given_again_whatever_the_time_is(run: Store, lost: int) -> None:
    """Agents obey the driver that had it, and UNIX time was set back."""

    def taken(wall: float) -> Lease:
        store = ImmediateStore(run)
        found = asyncio.run(
            lease.take(
                store,
                lambda n: msgspec.structs.replace(opened(n, owner=DEAD), wall=wall),
                MachineClock(),
                lambda line: None,
                is_gone=lambda owner: True,
            )
        )
        assert isinstance(found, Lease)
        leave_marker(run, found.number)
        return found

    for _ in range(lost):
        first = taken(1_800_000_000.0)
    run.delete([f"{journal.FOLDER}/{journal.key_of(number)}" for number in range(1, lost + 1)])
    second = taken(1_700_000_000.0)
    assert second.number > first.number
    assert second.precedence > first.precedence
    assert read_history(run).lease == second.number
    third = taken(1_600_000_000.0)
    assert third.precedence > second.precedence


@pytest.mark.parametrize("written", [0, 1, 3], ids=["its-opening", "its-first-record", "a-later-one"])
def test_a_driver_whose_last_object_is_lost_goes_on_after_no_other_drivers(run: Store, written: int) -> None:
    """Another one has taken the run with the number that became free."""
    old = take(run, owner=DEAD).journal
    for step in range(written):
        write(old, 1, first=step + 1)
        flush(old)
    run.delete([f"{journal.FOLDER}/{journal.key_of(1 + written)}"])
    new = take(run)
    assert new.number == 1 + written
    old.append(records.Deleted(0.0, "something"))
    with pytest.raises(FencedError, match=re.escape(str(records.this_process()))):
        flush(old)
    with pytest.raises(FencedError):
        flush(old)


@pytest.mark.parametrize("freed", [False, True], ids=["used", "freed-by-the-version-before"])
def test_a_driver_that_wakes_up_after_a_compaction_is_fenced(run: Store, freed: bool) -> None:
    old = take(run, owner=DEAD).journal
    new = take(run).journal
    write(new, 10)
    compact(new)
    left = [file.path for file in run.child(journal.FOLDER).list()]
    assert journal.key_of(2) in left, "its number"
    assert journal.key_of(3) not in left
    if freed:
        run.delete([f"{journal.FOLDER}/{journal.key_of(2)}"])
    old.append(records.Deleted(0.0, "c1-1"))
    with pytest.raises(FencedError, match=str(records.this_process())):
        flush(old)
    write(new, 5, first=11)
    compact(new)
    history = read_history(run)
    assert list(history.checkpoints) == [f"c1-{n}" for n in range(1, 16)]
    assert scan(run).is_whole


def test_a_newcomer_that_wakes_up_after_a_compaction_does_not_take_the_run(run: Store) -> None:
    owner = take(run).journal

    def meanwhile(_: Owner) -> bool:
        if not owner.has_news:
            write(owner, 10)
            compact(owner)
            owner.append(records.Renewed(0.0))
        return True

    found = take(run, owner=DEAD, is_gone=meanwhile)
    assert found.number > 10
    with pytest.raises(FencedError):
        flush(owner)


def test_a_silent_owner_elsewhere_is_waited_out_and_one_that_writes_keeps_its_run(run: Store) -> None:
    old = take(run, owner=DEAD).journal
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            old.append(records.Renewed(0.0))
            flush(old)

    with pytest.raises(RunOwnedError, match="process 1 on elsewhere"):
        take(run, 5.0, say=say)
    assert "process 1 on elsewhere" in lines[0]
    take(run)
    assert read_history(run).lease == 3


def test_an_owner_that_renews_seldom_is_waited_for_as_long_as_it_said(run: Store) -> None:
    take(run, owner=DEAD, ttl_s=30.0)
    said: list[str] = []

    def is_gone(owner: Owner) -> bool:
        return bool(said)

    take(run, ttl_s=0.01, say=said.append, is_gone=is_gone)
    assert "silent for 30 s more" in said[0]


def test_an_owner_proven_dead_is_not_waited_for(run: Store) -> None:
    here = records.this_process()
    take(run, owner=msgspec.structs.replace(here, started=here.started - 1))
    said: list[str] = []
    take(run, 1000.0, say=said.append)
    assert said == []


def test_an_owner_in_another_pid_namespace_is_not_proven_dead(run: Store) -> None:
    here = records.this_process()
    assert not lease.is_dead(msgspec.structs.replace(here, pid=1 << 22, pid_namespace="pid:[1]"))
    assert lease.is_dead(msgspec.structs.replace(here, pid=1 << 22))


def test_an_owner_in_another_time_namespace_is_not_proven_dead(run: Store) -> None:
    """Its process seems to have started at another time, seen from here."""
    here = records.this_process()
    there = here.pid_namespace.replace("time:[", "time:[1")
    assert not lease.is_dead(msgspec.structs.replace(here, started=here.started + 1, pid_namespace=there))
    assert lease.is_dead(msgspec.structs.replace(here, started=here.started + 1))


def test_of_many_that_want_a_run_at_once_each_gets_its_own_lease(run: Store) -> None:
    got: list[int] = []

    def contend(n: int) -> None:
        store = ImmediateStore(run)
        found = asyncio.run(
            lease.take(store, lambda number: opened(number, nonce=str(n)), MachineClock(), lambda line: None)
        )
        assert isinstance(found, Lease)
        got.append(found.number)

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 8
    assert read_history(run).lease == max(got)


def test_a_run_that_finishes_while_it_is_waited_for_is_left_finished(run: Store) -> None:
    owner = take(run, owner=DEAD).journal

    def finish(_: Owner) -> bool:
        if not read_history(run).outcome:
            owner.append(records.Closed(0.0, "finished", "", None))
            flush(owner)
        return True

    def is_over(history: History) -> bool:
        return history.outcome == "finished"

    store = ImmediateStore(run)
    found = asyncio.run(
        lease.take(store, opened, MachineClock(), lambda line: None, is_gone=finish, is_over=is_over)
    )
    assert isinstance(found, History)
    assert read_history(run).outcome == "finished"


# ---------------------------------------------------------------------- lists that lag behind


class Lagging(ImmediateStore):
    """Its lists are those of an earlier time, for so many times. All else is as it is now."""

    def __init__(self, store: Store, listed: list[FileRecord] | None = None, times: int = 1000) -> None:
        super().__init__(store)
        self.listed = [*store.list()] if listed is None else listed
        self.times = times

    def child(self, prefix: str) -> ImmediateStore:
        below = [f for f in self.listed if f.path.startswith(f"{prefix}/")]
        listed = [msgspec.structs.replace(f, path=f.path.removeprefix(f"{prefix}/")) for f in below]
        return Lagging(self._store.child(prefix), listed, self.times)

    async def list(self, prefix: str = "", after: str = "") -> Sequence[FileRecord]:
        if self.times <= 0:
            return await super().list(prefix, after)
        self.times -= 1
        return [file for file in self.listed if file.path > after and file.path.startswith(prefix)]


def take_by_old_lists(run: Store, listed: list[FileRecord], times: int = 1000) -> Lease:
    taken = lease.take(
        Lagging(run, listed, times),
        opened,
        MachineClock(),
        lambda line: None,
        is_gone=lambda owner: True,
    )
    found = asyncio.run(taken)
    assert isinstance(found, Lease)
    return found


@pytest.mark.parametrize("before", [0, 3, 12])
def test_a_list_that_lacks_what_was_just_written_loses_nothing_of_the_journal(
    run: Store, before: int
) -> None:
    log = take(run, owner=DEAD).journal
    write(log, before)
    listed = [*run.list()] if before else []
    write(log, 5, first=before + 1)
    taken = take_by_old_lists(run, listed)
    assert not taken.damage
    assert [*taken.history.checkpoints] == [f"c1-{n}" for n in range(1, before + 6)]


def test_a_list_with_a_gap_loses_nothing_of_the_journal(run: Store) -> None:
    log = take(run, owner=DEAD).journal
    write(log, 10)
    compact(log)
    write(log, 5, first=11)
    gap = f"{journal.FOLDER}/{journal.key_of(14)}"
    assert run.exists(gap)
    taken = take_by_old_lists(run, [file for file in run.list() if file.path != gap])
    assert not taken.damage
    assert [*taken.history.checkpoints] == [f"c1-{n}" for n in range(1, 16)]


def test_a_run_is_not_taken_while_lists_name_what_has_been_archived(run: Store) -> None:
    log = take(run, owner=DEAD).journal
    write(log, 6)
    listed = [*run.list()]
    write(log, 4, first=7)
    compact(log)
    write(log, 2, first=11)
    taken = take_by_old_lists(run, listed, times=5)
    assert not taken.damage
    assert [*taken.history.checkpoints] == [f"c1-{n}" for n in range(1, 13)]


def test_a_list_that_stays_behind_is_said_to_be_so_and_the_run_is_left_alone(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = take(run, owner=DEAD).journal
    write(log, 6)
    listed = [*run.list()]
    write(log, 2, first=7)
    compact(log)
    monkeypatch.setattr(lease, "_LISTED_S", 0.0)
    there = [*run.list()]
    with pytest.raises(StorageError, match="lags behind"):
        take_by_old_lists(run, listed)
    assert [*run.list()] == there


def test_a_journal_of_which_next_to_nothing_is_left_is_damaged_and_goes_on(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What says that there was more is no reason to wait for it for ever."""
    log = take(run, owner=DEAD).journal
    write(log, 6)
    compact(log)
    write(log, 6, first=7)
    compact(log)
    names = [file.path for file in run.child(journal.FOLDER).list()]
    lost = [name for name in names if not name.startswith("past-") and name != journal.key_of(1)]
    run.delete([f"{journal.FOLDER}/{name}" for name in lost])
    monkeypatch.setattr(lease, "_LISTED_S", 0.0)
    taken = take(run)
    assert taken.damage
    complete(taken.mend(lambda line: None))
    write(taken.journal, 3, first=13)
    compact(taken.journal)
    assert scan(run).is_whole
    assert not scan(run).is_outdated
    assert rows(run) == [13, 14, 15]


@pytest.mark.parametrize("owners", [1, 2])
def test_a_newcomer_whose_list_has_only_what_no_compaction_removes_does_not_take_the_run_at_a_free_number(
    run: Store, owners: int
) -> None:
    for _ in range(owners):
        log = take(run, owner=DEAD).journal
        listed = [*run.list()]
    write(log, 8)
    compact(log)
    taken = take_by_old_lists(run, listed, times=20)
    assert not taken.damage
    assert [*taken.history.checkpoints] == [f"c1-{n}" for n in range(1, 9)]


def test_a_driver_that_was_replaced_is_fenced_also_where_lists_are_old(run: Store) -> None:
    old = take(run, owner=DEAD).journal
    write(old, 3)
    old._store = Lagging(run.child(journal.FOLDER))
    new = take(run).journal
    write(new, 10, first=4)
    compact(new)
    old.append(records.Deleted(0.0, "c1-3"))
    with pytest.raises(FencedError):
        flush(old)
    assert "c1-3" in read_history(run).checkpoints


def test_a_journal_is_not_said_to_be_removed_where_lists_are_old(run: Store) -> None:
    log = take(run).journal
    write(log, 3)
    compact(log)
    log._store = Lagging(run.child(journal.FOLDER))
    write(log, 10, first=4)
    compact(log)
    write(log, 3, first=14)
    assert scan(run).is_whole
    assert rows(run) == list(range(1, 17))


# ---------------------------------------------------------------------- compaction


def test_compaction_forgets_nothing_however_often_and_wherever_it_is_cut_off(run: Store) -> None:
    log = take(run).journal
    for n in range(40):
        write(log, 3, epoch=1, first=3 * n + 1)
        compact(log)
    write(log, 2, epoch=1, first=121)
    assert rows(run) == list(range(1, 123))
    names = [f.path for f in run.child(journal.FOLDER).list()]
    assert len(names) < 15, "old objects are gone"
    # Cut off after the snapshot and before the old objects went: they are still there, and count once.
    store = run.child(journal.FOLDER)
    kept = {f.path: store.read(f.path) for f in store.list() if f.path.isdigit()}
    log.append(records.Deleted(0.0, "c1-1"))
    compact(log)
    for name, data in kept.items():
        store.create(name, data or b"")
    assert len(rows(run)) == 122
    assert "c1-1" not in read_history(run).checkpoints


def test_records_of_a_compaction_whose_snapshot_fails_are_there_once(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = take(run).journal
    write(log, 5)
    monkeypatch.setattr(journal, "_PAUSE_S", 0.0)
    refuse_once(log, monkeypatch, lambda key: key.isdigit(), written=False)
    store = ThreadedStore(run.child(journal.FOLDER), Limits())
    log._store = store
    asyncio.run(log.compact())
    log._store = ImmediateStore(run.child(journal.FOLDER))
    write(log, 5, first=6)
    compact(log)
    assert rows(run) == list(range(1, 11))


def test_a_journal_that_is_read_while_it_is_compacted_is_whole(run: Store) -> None:
    log = take(run).journal
    write(log, 5)
    done = threading.Event()

    def keep_writing() -> None:
        for n in range(1, 60):
            write(log, 5, first=5 * n + 1)
            compact(log)
        done.set()

    writer = threading.Thread(target=keep_writing, daemon=True)
    writer.start()
    seen = 0
    while not done.is_set():
        found = scan(run)
        history = History.of(found.records())
        assert found.is_whole
        read = [msgspec.msgpack.decode(row)["n"] for row in history.metrics]
        assert read == list(range(1, len(read) + 1))
        assert len(read) >= seen
        seen = len(read)
    writer.join()
    assert len(rows(run)) == 300


def test_large_batches_and_archives_are_cut_so_that_a_slow_store_can_take_them(
    run: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 1000)
    monkeypatch.setattr(journal, "MOST_ARCHIVED", 5000)
    log = take(run).journal
    for n in range(500):
        log.append(records.Deleted(0.0, f"folder-{n}"))
        if n % 100 == 99:
            flush(log)
            compact(log)
    sizes = [f.size for f in run.child(journal.FOLDER).list()]
    assert max(sizes) <= 8000
    assert sum(isinstance(r, records.Deleted) for r in journal.read(run)) == 500


# ---------------------------------------------------------------------- storage that fails


def refuse_once(
    log: Journal, monkeypatch: pytest.MonkeyPatch, which: Callable[[str], bool], *, written: bool
) -> None:
    real = FolderStore.create

    def fails_once(self: FolderStore, key: str, data: bytes) -> bool:
        if not which(key):
            return real(self, key, data)
        monkeypatch.setattr(FolderStore, "create", real)
        if written:
            real(self, key, data)
        raise StorageError("no answer")

    monkeypatch.setattr(FolderStore, "create", fails_once)


@pytest.mark.parametrize("written", [True, False])
def test_what_storage_refused_is_written_the_next_time_also_if_it_was_written_after_all(
    run: Store, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = take(run).journal
    refuse_once(log, monkeypatch, str.isdigit, written=written)
    log.append(records.Deleted(0.0, "one"))
    with pytest.raises(StorageError, match="no answer"):
        flush(log)
    log.append(records.Deleted(0.0, "two"))
    assert flush(log)
    assert [r.folder for r in journal.read(run) if isinstance(r, records.Deleted)] == ["one", "two"]


# ---------------------------------------------------------------------- damage


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize(
    "how", [corrupt, fill_with_zeros, empty, Path.unlink, lambda path: os.truncate(path, 30)]
)
def test_damage_is_named_and_costs_no_more_than_what_it_hit(
    run: Store, tmp_path: Path, how: Callable[[Path], None], compacted: bool
) -> None:
    log = take(run).journal
    write(log, 10)
    if compacted:
        compact(log)
        write(log, 3, first=11)
    folder = tmp_path / "run" / "journal"
    hit = min(folder.glob("archive-*")) if compacted else folder / journal.key_of(6)
    how(hit)
    found = scan(run)
    assert [hit.name in damage for damage in found.damage] == [True]
    left = set(History.of(found.records()).checkpoints)
    unhurt = {11, 12, 13} if compacted else {*range(1, 11)} - {5}
    assert {f"c1-{n}" for n in unhurt} <= left
    assert found.next == (16 if compacted else 12)
    assert take(run).number == found.next


class CutOffError(Exception):
    pass


class CutOffStore(ImmediateStore):
    """After so many objects that were made or deleted, nothing more happens."""

    def __init__(self, store: Store, after: int) -> None:
        super().__init__(store)
        self._left = after

    async def create(self, key: str, data: bytes) -> bool:
        self._count()
        return await super().create(key, data)

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._count()
            await super().delete([key])

    def _count(self) -> None:
        if not self._left:
            raise CutOffError
        self._left -= 1


def test_wherever_a_compaction_is_cut_off_damage_is_seen_and_what_is_lost_is_named(tmp_path: Path) -> None:
    for cut in range(30):
        folder = tmp_path / str(cut) / "run"
        run = open_store(str(folder))
        log = take(run).journal
        store = CutOffStore(run.child(journal.FOLDER), cut)
        log._store = store
        with contextlib.suppress(CutOffError):
            for n in range(4):
                write(log, 5, first=5 * n + 1)
                compact(log)
        whole, listed, before = rows(run), {*os.listdir(folder / "journal")}, scan(run)
        assert before.is_whole
        counts = {*before.archives, *map(journal.key_of, range(before.first, before.next))}
        assert counts <= listed
        # Of the last, nobody can know that it was there.
        for name in listed - {journal.key_of(before.next - 1)}:
            data = (folder / "journal" / name).read_bytes()
            (folder / "journal" / name).unlink()
            found, is_named = rows(run), any(name in damage for damage in scan(run).damage)
            assert scan(run).is_whole == (name not in counts), (cut, name)
            # What an archive has already, although no record names it yet, is not lost.
            assert found == whole or is_named, (cut, name)
            (folder / "journal" / name).write_bytes(data)


@pytest.mark.parametrize("how", [corrupt, Path.unlink])
def test_archives_are_read_also_if_what_names_them_is_lost(
    run: Store, tmp_path: Path, how: Callable[[Path], None]
) -> None:
    taken = take(run)
    log = taken.journal
    write(log, 10)
    compact(log)
    folder = tmp_path / "run" / "journal"
    superseded = min(folder.glob("archive-*"))
    left = superseded.read_bytes()
    write(log, 10, first=11)
    compact(log)
    superseded.write_bytes(left)
    write(log, 3, first=21)
    numbers = journal.numbers_in(os.listdir(folder))
    how(folder / journal.key_of(min({*numbers} - {taken.number})))
    assert not scan(run).is_whole
    assert rows(run) == list(range(1, 24))
    taken = take(run)
    complete(taken.journal.start_anew(taken.history.as_records()))
    assert scan(run).is_whole
    assert rows(run) == list(range(1, 24))


def test_files_of_others_in_the_journals_folder_are_left_alone(run: Store, tmp_path: Path) -> None:
    log = take(run).journal
    write(log, 3)
    folder = tmp_path / "run" / "journal"
    others = ["archive-of-mine.tar", "0000000002.bak", "archive-0000000002-copy", "99", "\u00b2"]
    for name in others:
        (folder / name).write_bytes(b"")
    write(log, 3, first=4)
    compact(log)
    write(take(run).journal, 1, first=7)
    assert scan(run).is_whole
    assert rows(run) == list(range(1, 8))
    assert {*others} <= {*os.listdir(folder)}


def test_compaction_deletes_nothing_on_the_word_of_a_damaged_object(run: Store, tmp_path: Path) -> None:
    log = take(run).journal
    write(log, 10)
    corrupt(tmp_path / "run" / "journal" / journal.key_of(6))
    before = run.list()
    with pytest.raises(StorageError, match=journal.key_of(6)):
        compact(log)
    assert run.list() == before


def test_a_journal_that_was_removed_gets_a_new_beginning(run: Store, tmp_path: Path) -> None:
    taken = take(run)
    log, history = taken.journal, taken.history
    write(log, 10)
    for record in journal.read(run):
        if isinstance(record, records.Metrics | records.Committed):
            history.apply(record)
    shutil.rmtree(tmp_path / "run")
    log.append(records.Renewed(0.0))
    with pytest.raises(journal.JournalRemovedError):
        flush(log)
    complete(log.start_anew(history.as_records()))
    write(log, 3, first=11)
    assert scan(run).is_whole
    assert rows(run) == list(range(1, 14))
    assert list(read_history(run).checkpoints) == [f"c1-{n}" for n in range(1, 14)]


def test_a_compaction_does_not_bring_back_what_a_new_beginning_replaces(run: Store, tmp_path: Path) -> None:
    taken = take(run)
    log = taken.journal
    write(log, 10)
    create = FolderStore.create
    records_now = [*journal.read(run)]

    def removed_while_an_archive_is_written(self: FolderStore, key: str, data: bytes) -> bool:
        if key.startswith("archive-") and (tmp_path / "run" / "journal" / journal.key_of(1)).exists():
            shutil.rmtree(tmp_path / "run")
            complete(log.start_anew(records_now))
        return create(self, key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderStore, "create", removed_while_an_archive_is_written)
        compact(log)
    write(log, 3, first=11)
    compact(log)
    assert scan(run).is_whole
    assert rows(run) == list(range(1, 14))


OWNER_2 = {"host": "h", "boot": "b", "pid": 1, "started": 1, "engine": "", "pid_namespace": "n"}
METRICS_2 = {"type": "Metrics", "epoch": 1, "first": 1, "rows": [{"n": 1}, {"n": 2}]}
OPENED_2 = {
    "type": "Opened",
    "format": 2,
    "lease": 1,
    "owner": OWNER_2,
    "at": 0.0,
    "wall": 0.0,
    "version": "0.0.9",
    "name": "run",
    "workers_min": 1,
    "workers_max": 1,
    "fingerprint": "code",
    "config": "config",
    "nonce": "n",
}
COMMITTED_2 = {
    "type": "Committed",
    "at": 1.0,
    "folder": "checkpoint_0001_000002",
    "epoch": 1,
    "index": 2,
    "metrics": {"n": 2},
    "external": None,
}
CLOSED_2 = {"type": "Closed", "at": 2.0, "outcome": "stopped", "message": "", "value": None}


def put(run: Store, number: int, *found: dict[str, Any]) -> None:
    data = b""
    for record in found:
        body = msgspec.msgpack.encode(record)
        data += struct.pack("<II", len(body), zlib.crc32(body)) + body
    run.create(f"{journal.FOLDER}/{journal.key_of(number)}", data)


def test_a_journal_of_the_version_before_is_read_and_gone_on_with(run: Store) -> None:
    put(run, 1, OPENED_2, METRICS_2)
    put(run, 2, {"type": "Snapshot", "archives": []}, OPENED_2, METRICS_2, COMMITTED_2)
    put(run, 3, CLOSED_2)
    taken = take(run)
    assert [*taken.history.checkpoints] == ["checkpoint_0001_000002"]
    write(taken.journal, 1, first=3)
    assert rows(run) == [1, 2, 3]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(records.OLDEST - 1, "Finish the run with Everstep 0.0.9"), (records.FORMAT + 1, "Upgrade Everstep")],
)
def test_a_journal_of_a_version_that_is_not_read_is_refused_with_the_remedy(
    run: Store, number: int, remedy: str
) -> None:
    put(run, 1, {**OPENED_2, "format": number})
    with pytest.raises(
        JournalFormatError, match=f"format {number}.*{records.OLDEST} to {records.FORMAT}"
    ) as e:
        take(run)
    assert remedy in str(e.value)


def test_a_driver_that_is_replaced_by_one_of_a_newer_version_stops(run: Store) -> None:
    log = take(run).journal
    put(run, 2, {**OPENED_2, "format": records.FORMAT + 1})
    log.append(records.Renewed(0.0))
    with pytest.raises(FencedError, match="another version"):
        flush(log)


def test_a_journal_of_which_only_an_archive_is_left_is_damaged_and_its_numbers_are_not_used_again(
    run: Store,
) -> None:
    log = take(run).journal
    write(log, 5)
    compact(log)
    store = run.child(journal.FOLDER)
    numbered = [file.path for file in store.list() if file.path.isdigit()]
    store.delete(numbered)
    found = scan(run)
    assert not found.is_whole
    assert found.next >= int(min(numbered))
