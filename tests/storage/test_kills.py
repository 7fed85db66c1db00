"""``kill -9`` of an uploading process at any instant: afterwards the checkpoint is whole, or isn't there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everstep.errors import StorageError
from everstep.storage import pending_uploads, restore
from everstep.storage.bucket import PIECE
from everstep.storage.store import Store, open_store
from storage import blocking
from storage.server import S3Server

_UPLOADS = """
import sys
from pathlib import Path
from everstep.storage import checkpoints, pending_uploads
from everstep.storage.store import open_store
address, options, source, spool = sys.argv[1], eval(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
run = open_store(address, options)
run.exists("warm")
print("ready", flush=True)
for index in range(1, 1000):
    folder = checkpoints.folder_name(1, index, None, 0)
    share = checkpoints.Share(folder, 0, 1, index)
    job = pending_uploads.take(spool, address, share, source, keep=True)
    part = pending_uploads.finish(job, run)
    blocking.commit(run, folder, 1, index, [part.record])
    pending_uploads.forget(job)
    print(index, flush=True)
"""


@pytest.mark.parametrize(("kind", "kills"), [("folder", 25), ("s3", 8)])
def test_a_killed_upload_leaves_a_whole_checkpoint_or_none(
    kind: str, kills: int, server: S3Server, tmp_path: Path
) -> None:
    seed = int(os.environ.get("EVERSTEP_TEST_SEED") or time.time_ns() % 1_000_000)
    print(f"EVERSTEP_TEST_SEED={seed}")
    draw = random.Random(seed)
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    for name, size in {"large": PIECE + 1, "sub/a": 100_000, "sub/b": 0, "c": 10}.items():
        (source / name).write_bytes(draw.randbytes(size))
    options = server.options() if kind == "s3" else {}
    for attempt in range(kills):
        address = f"s3://{server.bucket()}/run" if kind == "s3" else str(tmp_path / f"run-{attempt}")
        spool = tmp_path / f"spool-{attempt}"
        process = subprocess.Popen(
            [sys.executable, "-c", _UPLOADS, address, repr(options), str(source), str(spool)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # The instant is the point: it is drawn, and the whole of the loop above is in its range.
        time.sleep(draw.random() * (0.15 if kind == "folder" else 0.6))
        process.kill()
        said = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        run = open_store(address, options)
        told = [int(word) for word in said]
        _check(run, told, tmp_path / f"cache-{attempt}")
        _take_over(run, spool, said=len(told))


def _check(run: Store, told: list[int], cache: Path) -> None:
    """What was committed is whole; what isn't, isn't there."""
    whole = 0
    for folder in blocking.list_folders(run):
        manifest = blocking.read_manifest(run, folder)
        if manifest is None:
            with pytest.raises(StorageError):
                blocking.fetch(run.child(folder), cache)
            continue
        restore.verify(run.child(folder))
        assert [file.path for file in manifest.files] == ["c", "large", "sub/a", "sub/b"]
        whole += 1
    assert whole >= len(told), "a checkpoint that was committed is missing"


def _take_over(run: Store, spool: Path, said: int) -> None:
    """Another process finishes the job that was left, commits it, and collects the rest."""
    for job in pending_uploads.pending(spool):
        what = pending_uploads.read(job)
        part = pending_uploads.finish(job, run)
        blocking.commit(run, what.share.folder, 1, what.share.index, [part.record])
        restore.verify(run.child(what.share.folder))
        pending_uploads.forget(job)
    committed = [f for f in blocking.list_folders(run) if blocking.read_manifest(run, f) is not None]
    for folder in {*blocking.list_folders(run)} - {*committed}:
        blocking.discard(run, folder)
    assert blocking.list_folders(run) == committed
    assert len(committed) >= said
