"""What workers are told of machines that will be taken away."""

from __future__ import annotations

from everstep.driver.notices import NoticesToWorkers
from everstep.driver.streams import WorkerStream
from everstep.protocol import worker_messages
from everstep.topology.placement import Assignment


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1000.0 + self.time


def on(rank: int, host: str) -> WorkerStream:
    return WorkerStream(Assignment(rank, host, 0, 1, rank, 2, 2, host, rank, 2, 0, 1, rank, 2), 0)


def test_the_deadline_is_that_of_hosts_that_workers_are_on() -> None:
    told: list[worker_messages.AnyValue] = []
    clock = Clock()
    notices = NoticesToWorkers(told.append, clock)
    notices.set("gone", 30.0)
    clock.time = 100.0
    notices.set("b", 160.0)
    notices.propose([on(0, "a"), on(1, "b")])
    assert told.pop() == worker_messages.Preemption(1_160_000, {"b": [1]})
    notices.set("b", None)
    notices.propose([on(0, "a"), on(1, "b")])
    assert told.pop() == worker_messages.Preemption(None, {})
