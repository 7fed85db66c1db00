"""Saving a checkpoint of several shards to a disk, beside ``cp``, ``sync``, ``sha256sum`` of the same bytes.

``python -m bench checkpoints``, or ``python -m bench.checkpoints --gib 4`` for a size of one's own. The two
sides take turns on the same disk, with the shards in the system's cache, and both make every byte durable and
know its digest at the end. Everstep's side runs in a fresh process, so that its memory can be told.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.figures import Outcome, Row, Sample, show, this_machine
from bench.options import Options
from bench.sides import BenchError

TITLE = "a checkpoint of several shards on a local disk"
ROUNDS, PEER_ROUNDS = 5, 5
SHARDS = 4
GIB = 1.0
"""In all shards together."""


def measure(options: Options, gib: float = GIB, folder: str | None = None) -> Outcome:
    found: dict[str, list[float]] = {"sync": [], "stall": [], "memory": [], "peer": []}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=folder) as temporary:
        work = Path(temporary)
        source = work / "source"
        _make_shards(source, int(gib * 2**30) // SHARDS)
        for at in range(max(options.rounds, options.peer_rounds)):
            if at < options.rounds:
                ours = _everstep(work, source)
                for name in ("sync", "stall", "memory"):
                    found[name].append(ours[name])
                options.say(
                    f"checkpoints: everstep: {at + 1} of {options.rounds}: {gib / ours['sync']:.2f} GiB/s"
                )
            if at < options.peer_rounds:
                found["peer"].append(_copy_sync_digest(work, source))
                options.say(
                    f"checkpoints: cp: {at + 1} of {options.peer_rounds}: {gib / found['peer'][-1]:.2f} GiB/s"
                )
    saved = Sample(tuple(found["sync"]))
    stalled = Sample(tuple(found["stall"]))
    size = f"{gib:g} GiB in {SHARDS} shards"
    rows = [Row(f"{size}, saved and committed", "s", saved)]
    notes = [
        f"ASYNC holds the training up for {stalled.median / saved.median:.2%} of the time that SYNC takes",
        f"memory of the saving process, above what it had: {max(found['memory']) / 2**20:.0f} MiB at most",
        f"Everstep: {gib / saved.median:.2f} GiB/s",
    ]
    if found["peer"]:
        copied = Sample(tuple(found["peer"]))
        rows.append(Row("the same bytes copied, synced and hashed", "s", copied, side="cp, sync, sha256sum"))
        notes.append(f"throughput: {copied.median / saved.median:.2f} × that of cp, sync and sha256sum")
    rows.append(Row("report() with ASYNC, the part that waits", "ms", stalled))
    return Outcome("checkpoints", TITLE, tuple(rows), tuple(notes))


def _make_shards(source: Path, size: int) -> None:
    source.mkdir()
    block = os.urandom(16 << 20)
    for shard in range(SHARDS):
        with (source / f"shard-{shard}").open("wb") as out:
            left = size
            while left:
                # Each block differs in its first bytes: nothing below us shall find two that are the same.
                piece = (os.urandom(16) + block[16:])[: min(left, len(block))]
                out.write(piece)
                left -= len(piece)
            out.flush()
            os.fsync(out.fileno())


def _everstep(work: Path, source: Path) -> dict[str, float]:
    """Save it in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.checkpoints", "--save", str(source), "--into", str(work / "run")],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BenchError(f"everstep: exit code {done.returncode}\n{done.stderr}")
    shutil.rmtree(work / "run")
    ours: dict[str, float] = json.loads(done.stdout)
    return ours


def _save(source: Path, into: Path) -> dict[str, Any]:
    """What a worker and the driver do at a report: the worker its part, the driver the manifest."""
    from everstep.saved.checkpoints import CheckpointRef
    from everstep.storage import checkpoints, pending_uploads
    from everstep.storage.asynchronous import ImmediateStore, complete
    from everstep.storage.store import open_store

    run = open_store(into)
    run.create("warm", b"")
    before = _resident("VmRSS")
    share = checkpoints.Share("checkpoint", 0, 1, 1)
    began = time.monotonic()
    part = checkpoints.upload_part(run, share, source)
    ref = CheckpointRef("checkpoint", 1, 1)
    manifest = complete(checkpoints.commit(ImmediateStore(run), ref, [part.record]))
    sync = time.monotonic() - began
    memory = _resident("VmHWM") - before
    assert len(manifest.files) == SHARDS, "a shard is missing"
    began = time.monotonic()
    pending_uploads.take(into / "spool", str(into), share, source, keep=True)
    return {"sync": sync, "stall": time.monotonic() - began, "memory": memory}


def _resident(what: str) -> int:
    """Bytes of memory, now (``VmRSS``) or at most (``VmHWM``). Not ``ru_maxrss``: a process inherits that."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"no {what} in /proc/self/status")


def _copy_sync_digest(work: Path, source: Path) -> float:
    target = work / "copy"
    target.mkdir()
    shards = [f"shard-{shard}" for shard in range(SHARDS)]
    began = time.monotonic()
    subprocess.run(["cp", "--reflink=never", *shards, str(target)], cwd=source, check=True)
    subprocess.run(["sync", *shards, "."], cwd=target, check=True)
    subprocess.run(["sha256sum", *shards], cwd=target, check=True, stdout=subprocess.DEVNULL)
    took = time.monotonic() - began
    shutil.rmtree(target)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoints", description=__doc__)
    parser.add_argument("--gib", type=float, default=GIB, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", help="on which disk (default: the temporary folder)")
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.save is not None:
        print(json.dumps(_save(given.save, given.into)))
        return
    from rich.console import Console

    options = Options(given.rounds, given.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    console = Console(width=None if sys.stdout.isatty() else 130)
    for line in this_machine().lines():
        console.print(line, highlight=False, soft_wrap=True)
    show(measure(options, given.gib, given.folder), console)


if __name__ == "__main__":
    main()
