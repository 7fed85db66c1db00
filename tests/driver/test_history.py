"""The journal reads back up to its last whole record, and retention keeps what it should."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from everstep import CheckpointConfig
from everstep.control.events import CheckpointRef
from everstep.driver import journal
from everstep.driver.history import History, Kept, read_history, to_delete


def write(run: Path, lease: int, count: int) -> Path:
    log = journal.Journal(run, lease)
    log.append(journal.Opened(journal.FORMAT, lease, 0.0, 0.0, "0", "run", 1, 1, 0))
    for n in range(count):
        raw = msgspec.Raw(msgspec.msgpack.encode({"n": n}))
        log.append(journal.Metrics(lease, n + 1, [raw]))
        log.append(journal.Committed(0.0, f"c{lease}-{n}", lease, n + 1, raw, None))
    log.close()
    return log.path


def test_a_journal_cut_off_anywhere_reads_up_to_its_last_whole_record(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 5)
    whole = path.read_bytes()
    counts = []
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        counts.append(sum(1 for _ in journal.read(tmp_path)))
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 11


def test_a_damaged_record_ends_that_file_and_not_the_next(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 3)
    data = bytearray(path.read_bytes())
    data[-3] ^= 0xFF
    path.write_bytes(data)
    write(tmp_path, 2, 2)
    history = read_history(tmp_path)
    assert history.lease == 2
    assert list(history.checkpoints) == ["c1-0", "c1-1", "c2-0", "c2-1"]
    assert len(history.metrics) == 5


def test_a_driver_can_not_write_over_another_ones_journal(tmp_path: Path) -> None:
    write(tmp_path, 1, 1)
    with pytest.raises(FileExistsError):
        journal.Journal(tmp_path, 1)


scores = st.lists(st.one_of(st.floats(), st.none()), max_size=12)


@given(scores, st.integers(1, 5), st.sampled_from(["max", "min"]))
def test_retention_never_removes_the_newest_and_never_something_better_than_what_it_keeps(
    values: list[float | None], keep: int, order: str
) -> None:
    history = History()
    for n, value in enumerate(values):
        ref = CheckpointRef(f"c{n}", 1, n)
        history.checkpoints[ref.folder] = Kept(ref, {} if value is None else {"s": value}, None)
    config = CheckpointConfig(num_to_keep=keep, checkpoint_score_attribute="s", checkpoint_score_order=order)  # type: ignore[arg-type]
    gone = to_delete(history, config)
    assert len(gone) == max(0, len(values) - keep)
    if not values:
        return
    newest = f"c{len(values) - 1}"
    assert newest not in gone
    sign = 1 if order == "max" else -1

    def worth(folder: str) -> float:
        value = history.checkpoints[folder].metrics.get("s", math.nan)
        return -math.inf if math.isnan(value) else sign * value

    kept = [folder for folder in history.checkpoints if folder not in gone and folder != newest]
    assert all(worth(k) >= worth(g) for k in kept for g in gone)
