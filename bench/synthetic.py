"""A run's journal without its run: so many workers, so many incidents, as a driver would have written it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.control import commands as c
from everstep.control.budgets import Budget
from everstep.failures import Failure, Kind
from everstep.journal import journal, records

WALL = 1_700_000_000.0
HOSTS_OF_A_SLICE, WORKERS_OF_A_HOST = 4, 4
_EACH = 1_000
"""Records in an object."""

_TRACEBACK = """Traceback (most recent call last):
  File "train.py", line {line}, in train_fn
    loss = step(model, next(batches))
  File "train.py", line 31, in step
    raise FloatingPointError("the loss is not a number")
FloatingPointError: the loss is not a number
"""


def write_journal(run: Path, content: Iterator[records.AnyRecord]) -> None:
    folder = run / journal.FOLDER
    folder.mkdir(parents=True)
    batch: list[records.AnyRecord] = []
    number = 1
    for record in content:
        batch.append(record)
        if len(batch) == _EACH:
            (folder / journal.key_of(number)).write_bytes(b"".join(map(records.encode, batch)))
            batch, number = [], number + 1
    (folder / journal.key_of(number)).write_bytes(b"".join(map(records.encode, batch)))


def row(**metrics: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(metrics))


def opened(workers: int, name: str = "synthetic", at: float = 0.0) -> records.Opened:
    owner = records.Owner("host", "boot", 1, 1)
    return records.Opened(
        records.FORMAT, 1, owner, at, WALL + at, "0.1.0", name, workers, workers, "", "", ""
    )


def place(rank: int, moved: int = 0) -> records.Place:
    host = rank // WORKERS_OF_A_HOST
    at = f"slice-{host // HOSTS_OF_A_SLICE}"
    return records.Place(rank, f"{at}-host-{host % HOSTS_OF_A_SLICE}{f'-{moved}' if moved else ''}", at, 0)


def synthetic(workers: int, incidents: int, seed: int = 0) -> Iterator[records.AnyRecord]:
    """Each incident stops all workers: a crash, a hang or a host that is lost."""
    rng = random.Random(seed)
    at, step = 5.0, 0
    yield opened(workers)
    yield c.PhaseChanged(0.5, "placing", 0)
    yield records.Placed(1.0, [place(rank) for rank in range(workers)], [])
    yield c.PhaseChanged(1.0, "starting", 1)
    yield c.PhaseChanged(at, "running", 1)
    yield c.GroupStarted(at, 1, ((0, 0),), workers, 1, c.Rung.FIRST_START, "first start", None)
    folder = None
    for attempt in range(1, incidents + 1):
        trained = rng.uniform(20, 120)
        losses = [4 / math.sqrt(step + i + 1) + rng.gauss(0, 0.02) for i in range(20)]
        yield records.Metrics(attempt, 1, [row(loss=loss, step=step + i) for i, loss in enumerate(losses)])
        before, folder = folder, f"checkpoint_{attempt:06d}"
        yield records.Committed(at + trained / 2, folder, attempt, 15, row(loss=losses[14]), None)
        if before is not None:
            yield records.Deleted(at + trained / 2, before)
        at, step = at + trained, step + 15
        rank = rng.randrange(workers)
        yield from _incident(rng, at, attempt, rank, workers, folder)
        at += 12.0
    yield c.PhaseChanged(at + 60, "ending", incidents + 1)
    yield c.PhaseChanged(at + 61, "ended", incidents + 1)
    yield records.Closed(at + 61, "finished", "finished", None)


def _incident(
    rng: random.Random, at: float, attempt: int, rank: int, workers: int, folder: str
) -> Iterator[records.AnyRecord]:
    kind = rng.choice([Kind.EXCEPTION, Kind.HANG, Kind.HOST_LOST])
    host = place(rank).host
    match kind:
        case Kind.EXCEPTION:
            text = _TRACEBACK.format(line=rng.randrange(10, 99))
            failure = Failure(
                kind, at, "FloatingPointError: the loss is not a number", rank, host, traceback=text
            )
        case Kind.HANG:
            message = "no progress for 25 s (usually 0.4 s), at train.py:31 in next_batch"
            stacks = f"hangs/{attempt:04d}.txt"
            yield c.HangSeen(at + 2, attempt, (rank,), message, stacks, "restart")
            failure = Failure(kind, at - 20, message, rank, host)
        case _:
            failure = Failure(kind, at, "its connection broke", None, host)
    yield c.FailureSeen(at + 2, failure)
    yield c.PhaseChanged(at + 2, "stopping", attempt)
    yield c.RecoveryDecided(at + 3, failure, Budget.FAILURES, attempt, -1, (), 0.0)
    yield c.PhaseChanged(at + 3, "placing", attempt)
    if kind is Kind.HOST_LOST:
        moved = [place(r, attempt) for r in range(workers) if place(r).host == host]
        yield records.Placed(at + 4, moved[:WORKERS_OF_A_HOST], [])
    yield c.PhaseChanged(at + 4, "starting", attempt + 1)
    yield c.PhaseChanged(at + 9, "running", attempt + 1)
    yield c.GroupStarted(
        at + 9, attempt + 1, ((0, 0),), workers, 1, c.Rung.RESTART_IN_PLACE, "after a failure", folder
    )
    yield c.Recovered(
        at + 11, attempt + 1, c.Rung.RESTART_IN_PLACE, failure, "its hosts", 5,
        2.0, 1.0, 0.0, 1.0, 2.0, 3.0, 1.5, 0.5, f"storage, {folder}",
    )  # fmt: skip
