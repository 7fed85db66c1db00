"""Workers whose start waits for the journal, and what happens to them meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from everstep.backend.base import Member
from everstep.config import CheckpointConfig
from everstep.control import commands as c
from everstep.driver.workers import Workers
from everstep.journal.history import History
from everstep.process.clock import MachineClock
from everstep.protocol import wire
from everstep.topology.placement import Assignment

HOSTS = ("a", "b")
PLACES = tuple(
    Assignment(rank, host, 0, 1, rank, 2, 2, host, rank, 2, 0, 1, rank, 2) for rank, host in enumerate(HOSTS)
)


def spec(rank: int, epoch: int) -> wire.WorkerSpec:
    member = Member(rank, 2, 0, 1, rank, 2, group_rank=rank, group_size=2)
    return wire.WorkerSpec(
        "run", "/runs/run", epoch, 0, PLACES[rank], member, None, "", "", 0, 1.0, 1.0, 1.0, 1.0, False, False
    )


def starting(epoch: int) -> Workers:
    """Two workers, one on each host."""
    config = CheckpointConfig()
    run = SimpleNamespace(
        job=SimpleNamespace(
            scaling=SimpleNamespace(replica_group_size=None),
            run=SimpleNamespace(checkpoint_config=config),
            store=None,
        ),
        controller=SimpleNamespace(epoch=epoch),
        observer=SimpleNamespace(say=lambda line: None),
        history=History(),
        clock=MachineClock(),
        precedence=1,
        write=lambda record: None,
        record=lambda record: None,
    )
    workers = Workers(cast(Any, run))
    workers.begin(c.StartWorkers(epoch, ((0, 0),), PLACES, None, "first start"))
    return workers


def test_a_worker_is_not_started_on_a_host_that_was_lost_while_its_start_waited() -> None:
    """It may be back by then, and have workers of a later attempt."""
    workers, specs = starting(3), [spec(rank, 3) for rank in range(2)]
    assert workers.wanted(specs) == specs
    workers.retired("b")
    assert workers.wanted(specs) == specs[:1]


def test_a_worker_that_was_stopped_while_its_start_waited_is_not_started() -> None:
    workers, specs = starting(3), [spec(rank, 3) for rank in range(2)]
    workers.stopping(c.StopWorkers("a", 3, frozenset({0}), 0.0))
    assert workers.wanted(specs) == specs[1:]


def test_a_host_that_was_lost_is_used_by_the_next_attempt() -> None:
    workers = starting(3)
    workers.retired("b")
    cast(Any, workers)._run.controller.epoch = 4
    workers.begin(c.StartWorkers(4, ((0, 0),), PLACES, None, "a host was lost"))
    specs = [spec(rank, 4) for rank in range(2)]
    assert workers.wanted(specs) == specs
