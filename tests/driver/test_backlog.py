"""What a driver is told again of the workers that it takes over: which reports were made before it ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from everstep.driver.from_workers import FromWorkers
from everstep.driver.streams import WorkerStream
from everstep.identity import WorkerId
from everstep.observe.observer import NewReports
from everstep.protocol import framing, wire, worker_messages
from everstep.topology.placement import Assignment

RAW = msgspec.Raw(msgspec.msgpack.encode({}))
OPENED, AHEAD = 100.0, 50.0
"""When the driver came; and how far the clock of the workers' host is ahead of its own."""


class Heard:
    """A driver that has taken one worker over, and what its observers are told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        stream = WorkerStream(Assignment(0, "host", 0, 1, 0, 1, 1, "slice", 0, 1, 0, 1, 0, 1), 0)
        stream.behind = True
        pace = SimpleNamespace(reported=lambda *_: None)
        metrics = SimpleNamespace(add=lambda *_: None, newest=lambda _: None)
        workers: Any = SimpleNamespace(
            streams={WorkerId(1, 0, 0): stream}, pace=pace, metrics=metrics, current=lambda: [stream]
        )
        run: Any = SimpleNamespace(
            clock=SimpleNamespace(now=lambda: OPENED + 1.0),
            engine=SimpleNamespace(time_here=lambda host, at: at - AHEAD),
            history=SimpleNamespace(opened=SimpleNamespace(at=OPENED), checkpoints={}),
            controller=SimpleNamespace(epoch=1),
            job=SimpleNamespace(wants_all_metrics=False),
            observer=self,
            emit_progress=lambda event: None,
        )
        self.from_workers = FromWorkers(run, workers)

    def progress(self, rank: int, epoch: int, index: int, newest: NewReports) -> None:
        self.told.append((index, newest.earlier))

    def hear(self, *reports: tuple[int, float | None]) -> None:
        data = b"".join(framing.frame(worker_messages.Report(index, RAW, at=at)) for index, at in reports)
        self.from_workers.received(wire.FromWorker(1, 0, 0, 0, data))


def test_reports_are_earlier_by_their_own_times() -> None:
    heard = Heard()
    heard.hear((1, AHEAD + 98.0), (2, AHEAD + 99.9), (3, AHEAD + 100.1))
    heard.hear((4, AHEAD + 100.2))
    assert heard.told == [(3, 2), (4, 0)]


@pytest.mark.parametrize("at", [None, AHEAD + 100.5])
def test_reports_that_are_new_or_of_unknown_time_are_this_drivers(at: float | None) -> None:
    heard = Heard()
    heard.hear((1, at), (2, at))
    assert heard.told == [(2, 0)]


def test_what_an_earlier_driver_had_dealt_with_is_earlier() -> None:
    heard = Heard()
    heard.hear((1, AHEAD + 98.0), (2, AHEAD + 98.5))
    heard.from_workers.emit_adopted()
    assert heard.told[-1] == (2, 2)
