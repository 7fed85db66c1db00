"""Uploads that outlive the process that began them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.errors import StorageError
from everstep.storage import checkpoints, pending_uploads, restore
from everstep.storage.store import Store, open_store
from storage import blocking

SHARE = checkpoints.Share("c", 3, 1, 7)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_text("1" * 1000)
    (folder / "sub" / "more").write_text("2")
    return folder


def test_a_snapshot_needs_its_source_no_more(store: Store, tmp_path: Path, source: Path) -> None:
    job = pending_uploads.take(tmp_path / "spool", store.address(), SHARE, source, keep=False)
    assert not source.exists()
    part = pending_uploads.finish(job, store)
    assert (part.index, part.folder) == (7, "c")
    blocking.commit(store, "c", 1, 7, [part.record])
    assert restore.verify(store.child("c")).ranks == [3]
    pending_uploads.forget(job)
    pending_uploads.forget(job)
    assert list((tmp_path / "spool").iterdir()) == []


def test_files_are_linked_not_copied(tmp_path: Path, source: Path) -> None:
    job = pending_uploads.take(tmp_path / "spool", "/run", SHARE, source, keep=True)
    place = Path(pending_uploads.read(job).place)
    assert (place / "weights").samefile(source / "weights")
    pending_uploads.forget(job)
    assert (source / "weights").exists()


def test_doing_a_job_again_comes_to_the_same_part(store: Store, tmp_path: Path, source: Path) -> None:
    job = pending_uploads.take(tmp_path / "spool", store.address(), SHARE, source, keep=True)
    assert pending_uploads.finish(job, store) == pending_uploads.finish(job, store)


def test_a_file_that_was_written_over_in_place_is_not_uploaded_as_the_old_one(
    store: Store, tmp_path: Path, source: Path
) -> None:
    job = pending_uploads.take(tmp_path / "spool", store.address(), SHARE, source, keep=True)
    with (source / "weights").open("r+b") as file:
        file.write(b"3")
    with pytest.raises(StorageError, match="weights was written over.*new folder"):
        pending_uploads.finish(job, store)
    assert blocking.read_parts(store, "c") == []


def test_on_another_disk_the_files_are_pinned_beside_their_source(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def across(src: str, dst: Path) -> None:
        if "spool" in str(dst):
            raise OSError(18, "Invalid cross-device link")
        link(src, dst)

    monkeypatch.setattr(os, "link", across)
    job = pending_uploads.take(tmp_path / "spool", "/run", SHARE, source, keep=True)
    monkeypatch.undo()
    place = Path(pending_uploads.read(job).place)
    assert place.parent == source.parent
    assert (place / "weights").samefile(source / "weights")
    pending_uploads.forget(job)
    assert not place.exists()


def test_where_there_are_no_hard_links_the_files_are_copied(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(src: str, dst: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    job = pending_uploads.take(tmp_path / "spool", "/run", SHARE, source, keep=True)
    monkeypatch.undo()
    (source / "weights").write_text("changed")
    store = open_store(tmp_path / "run")
    pending_uploads.finish(job, store)
    stored = [file.path for file in store.list() if file.path.endswith("weights")]
    assert [store.read(path) for path in stored] == [b"1" * 1000]


_WORKER = """
import sys, time
from pathlib import Path
from everstep.storage import pending_uploads
from everstep.storage.checkpoints import Share
job = pending_uploads.take(Path(sys.argv[1]), sys.argv[2], Share("c", 3, 1, 7), Path(sys.argv[3]), keep=False)
print("reported", flush=True)
time.sleep(600)
"""


def test_a_report_that_returned_survives_its_workers_sigkill(
    store: Store, tmp_path: Path, source: Path
) -> None:
    spool = tmp_path / "spool"
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(spool), store.address(), str(source)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "reported\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    (job,) = pending_uploads.pending(spool)
    assert pending_uploads.read(job).run == store.address()
    part = pending_uploads.finish(job, store)
    blocking.commit(store, "c", 1, 7, [part.record])
    assert [file.path for file in restore.verify(store.child("c")).files] == ["sub/more", "weights"]


def test_jobs_are_found_oldest_first_and_half_made_ones_not_at_all(tmp_path: Path, source: Path) -> None:
    spool = tmp_path / "spool"
    jobs = []
    for index in range(3):
        share = checkpoints.Share(f"c{9 - index}", 0, 1, index)
        jobs.append(pending_uploads.take(spool, "/run", share, source, keep=True))
        os.utime(jobs[-1], ns=(index, index))
    (spool / "half" / "files").mkdir(parents=True)
    assert pending_uploads.pending(spool) == jobs
