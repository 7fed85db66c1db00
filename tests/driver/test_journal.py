"""The journal: numbered objects that are made once, a lease that is a record in it, and nothing forgotten."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from everstep.driver import journal, lease
from everstep.driver.history import read_history
from everstep.driver.journal import Journal, Opened, Owner
from everstep.errors import FencedError, RunOwnedError, StorageError
from everstep.storage.store import Store, open_store

DEAD = Owner("elsewhere", "another boot", 1, 1)


def opened(number: int, owner: Owner | None = None, nonce: str = "n") -> Opened:
    return Opened(
        journal.FORMAT, number, owner or journal.me(), 0.0, 0.0, "0", "run", 1, 1, "code", "config", nonce
    )


def take(run: Store, ttl_s: float = 0.05, owner: Owner | None = None) -> Journal:
    log, _ = lease.take(run, lambda n: opened(n, owner), ttl_s, lambda line: None)
    return log


def write(log: Journal, count: int, epoch: int = 1, first: int = 1) -> None:
    for n in range(first, first + count):
        raw = msgspec.Raw(msgspec.msgpack.encode({"n": n}))
        log.append(journal.Metrics(epoch, n, [raw]))
        log.append(journal.Committed(0.0, f"c{epoch}-{n}", epoch, n, raw, None))
        log.flush()


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def test_what_is_written_is_read_back_in_order(run: Store) -> None:
    write(take(run), 5)
    history = read_history(run)
    assert history.lease == 1
    assert list(history.checkpoints) == [f"c1-{n}" for n in range(1, 6)]
    assert [msgspec.msgpack.decode(row)["n"] for row in history.metrics] == [1, 2, 3, 4, 5]


def test_an_object_cut_off_anywhere_reads_up_to_its_last_whole_record(run: Store, tmp_path: Path) -> None:
    log = take(run)
    for n in range(4):
        log.append(journal.Deleted(0.0, f"f{n}"))
    log.flush()
    path = tmp_path / "run" / "journal" / journal.key_of(2)
    whole = path.read_bytes()
    counts = []
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        counts.append(sum(isinstance(r, journal.Deleted) for r in journal.read(run)))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 4)


def test_a_driver_that_was_replaced_collides_at_its_next_append_and_is_told_by_whom(run: Store) -> None:
    old = take(run, owner=DEAD)
    new = take(run)
    old.append(journal.Deleted(0.0, "something"))
    with pytest.raises(FencedError, match=str(journal.me())):
        old.flush()
    write(new, 1)
    with pytest.raises(FencedError):
        old.flush()
    assert not any(isinstance(r, journal.Deleted) for r in journal.read(run))
    assert read_history(run).lease == 2


def test_a_silent_owner_elsewhere_is_waited_out_and_one_that_writes_keeps_its_run(run: Store) -> None:
    old = take(run, owner=DEAD)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            old.append(journal.Renewed(0.0))
            old.flush()

    with pytest.raises(RunOwnedError, match="process 1 on elsewhere"):
        lease.take(run, opened, 5.0, say)
    assert "process 1 on elsewhere" in lines[0]
    take(run)
    assert read_history(run).lease == 2


def test_an_owner_proven_dead_is_not_waited_for(run: Store) -> None:
    here = journal.me()
    take(run, owner=Owner(here.host, here.boot, here.pid, here.started - 1))
    said: list[str] = []
    lease.take(run, opened, 1000.0, said.append)
    assert said == []


def test_of_many_that_want_a_run_at_once_each_gets_its_own_lease(run: Store) -> None:
    got: list[int] = []

    def contend(n: int) -> None:
        _, history = lease.take(run, lambda number: opened(number, nonce=str(n)), 1.0, lambda line: None)
        got.append(history.lease + 1)

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 9))


def test_compaction_forgets_nothing_however_often_and_wherever_it_is_cut_off(run: Store) -> None:
    log = take(run)
    for n in range(40):
        write(log, 3, epoch=1, first=3 * n + 1)
        log.compact()
    write(log, 2, epoch=1, first=121)
    history = read_history(run)
    assert [msgspec.msgpack.decode(row)["n"] for row in history.metrics] == list(range(1, 123))
    names = [f.path for f in run.child(journal.FOLDER).list()]
    assert len(names) < 45, "old objects are gone"
    # Cut off after the snapshot and before the old objects went: they are still there, and count once.
    store = run.child(journal.FOLDER)
    scan = journal.Scan(run)
    store.create(journal.key_of(scan.next), journal.encode(journal.Deleted(0.0, "c1-1")))
    log = Journal(store, scan.next + 1, scan.first, scan.archives)
    kept = {f.path: store.read(f.path) for f in store.list() if f.path.isdigit()}
    log.compact()
    for name, data in kept.items():
        store.create(name, data or b"")
    again = read_history(run)
    assert len(again.metrics) == 122
    assert "c1-1" not in again.checkpoints


def test_who_reads_while_it_is_compacted_sees_all_of_it(run: Store) -> None:
    log = take(run)
    write(log, 5)
    done = threading.Event()

    def keep_writing() -> None:
        for n in range(1, 60):
            write(log, 5, first=5 * n + 1)
            log.compact()
        done.set()

    writer = threading.Thread(target=keep_writing, daemon=True)
    writer.start()
    seen = 0
    while not done.is_set():
        history = read_history(run)
        rows = [msgspec.msgpack.decode(row)["n"] for row in history.metrics]
        assert rows == list(range(1, len(rows) + 1))
        assert len(rows) >= seen
        seen = len(rows)
    writer.join()
    assert len(read_history(run).metrics) == 300


@pytest.mark.parametrize("written", [True, False])
def test_what_storage_refused_is_written_the_next_time_also_if_it_was_written_after_all(
    run: Store, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = take(run)
    store = log._store
    real = type(store).create

    def fails_once(self: Store, key: str, data: bytes) -> bool:
        monkeypatch.setattr(type(store), "create", real)
        if written:
            real(store, key, data)  # type: ignore[arg-type]
        raise StorageError("no answer")

    monkeypatch.setattr(type(store), "create", fails_once)
    log.append(journal.Deleted(0.0, "one"))
    with pytest.raises(StorageError, match="no answer"):
        log.flush()
    log.append(journal.Deleted(0.0, "two"))
    assert log.flush()
    assert [r.folder for r in journal.read(run) if isinstance(r, journal.Deleted)] == ["one", "two"]
