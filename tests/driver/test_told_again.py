"""Words that are told a later driver again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from everstep.config import CheckpointConfig
from everstep.control import events as e
from everstep.driver.from_workers import FromWorkers
from everstep.driver.streams import Summary, WorkerStream
from everstep.driver.workers import Workers
from everstep.identity import WorkerId
from everstep.journal.history import History
from everstep.process.clock import MachineClock
from everstep.protocol import framing, wire, worker_messages
from everstep.saved.reports import Part
from everstep.topology.placement import Assignment

RAW = msgspec.Raw(msgspec.msgpack.encode({}))
PLACES = [
    Assignment(rank, host, 0, 1, rank, 2, 2, host, rank, 2, 0, 1, rank, 2) for rank, host in enumerate("ab")
]


def test_what_was_committed_or_given_up_is_not_committed_again_though_the_journal_lost_it() -> None:
    """Rank 1's part of checkpoint 2 was acknowledged: it counted. Rank 0's is told again, and alone."""
    events: list[e.Event] = []
    opened = History()
    opened.opened = cast(Any, SimpleNamespace(at=0.0))
    run = SimpleNamespace(
        job=SimpleNamespace(
            scaling=SimpleNamespace(replica_group_size=None),
            run=SimpleNamespace(checkpoint_config=CheckpointConfig()),
            store=None,
            wants_all_metrics=False,
        ),
        controller=SimpleNamespace(epoch=1),
        observer=SimpleNamespace(say=lambda line: None, progress=lambda *_: None),
        history=opened,
        engine=SimpleNamespace(time_here=lambda host, at: at),
        clock=MachineClock(),
        precedence=2,
        write=lambda record: None,
        record=lambda record: None,
        emit=events.append,
    )
    workers = Workers(cast(Any, run))
    states = [Summary(True, 1), Summary(True, 3, settled=(2,))]
    streams = {
        WorkerId(1, 0, a.rank): WorkerStream(a, 0, 0, msgspec.msgpack.encode(state))
        for a, state in zip(PLACES, states, strict=True)
    }
    workers.adopt(streams, {0: 10, 1: 11}, 1)
    again = [
        worker_messages.Report(2, RAW, owed=True),
        worker_messages.Report(3, RAW, Part(3, "c3")),
        worker_messages.PartDone(Part(2, "c2")),
    ]
    FromWorkers(cast(Any, run), workers).received(
        wire.FromWorker(1, 0, 0, 0, b"".join(framing.frame(word) for word in again))
    )
    [reported] = events
    assert isinstance(reported, e.Reported)
    assert (reported.upto, reported.owed) == (3, ())
    assert [part.folder for part in reported.parts] == ["c3"]
