"""When a user's callbacks are called, and with what."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.callbacks import TrainRunContext, UserCallback
from everstep.checkpoint import Checkpoint
from everstep.config import RunConfig, ScalingConfig
from everstep.control import commands as c
from everstep.failures import Failure, Kind
from everstep.identity import Incarnation
from everstep.observe.callbacks import Callbacks
from everstep.observe.display import PlainDisplay
from everstep.observe.registry import LiveRun, LiveWorker

FIRST, SECOND = Incarnation(1, 0, 0), Incarnation(2, 0, 0)


class Seen(UserCallback):
    def __init__(self) -> None:
        self.reports: list[tuple[list[int], Checkpoint | None]] = []
        self.failures: list[list[int]] = []

    def after_report(
        self, run_context: TrainRunContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        self.reports.append(([row["x"] for row in metrics], checkpoint))

    def after_exception(self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]) -> None:
        self.failures.append(sorted(worker_exceptions))


class Watched:
    """Two workers, and who watches them."""

    def __init__(self) -> None:
        self.seen = Seen()
        context = TrainRunContext("run", RunConfig(), ScalingConfig(num_workers=2))
        self.callbacks = Callbacks(PlainDisplay(), [self.seen], context)
        self.start(2)

    def start(self, workers: int) -> None:
        live = [LiveWorker(rank, 1, "host", "slice") for rank in range(workers)]
        self.callbacks.started(LiveRun("run", "", 1, 1, live))

    def report(self, rank: int, index: int, saves: bool = False, of: Incarnation = FIRST) -> None:
        metrics = msgspec.Raw(msgspec.msgpack.encode({"x": 10 * rank + index}))
        self.callbacks.reported(of, rank, index, metrics, saves)

    @property
    def told(self) -> list[tuple[list[int], Checkpoint | None]]:
        told, self.seen.reports = self.seen.reports, []
        return told

    def failed(self, rank: int) -> None:
        failure = Failure(Kind.SIGNAL, 0.0, "SIGKILL", rank=rank)
        self.callbacks.record(c.FailureSeen(0.0, failure))


def test_a_report_is_told_once_every_rank_has_made_it() -> None:
    run = Watched()
    run.report(1, 1)
    assert not run.told
    run.report(0, 1)
    assert run.told == [([1, 11], None)]


def test_a_report_with_a_checkpoint_is_told_once_that_is_committed() -> None:
    run = Watched()
    for index in (1, 2):
        run.report(0, index, saves=index == 1)
        run.report(1, index)
    assert run.told == [([2, 12], None)]
    run.callbacks.committed(FIRST, 1, "/run/one")
    assert run.told == [([1, 11], Checkpoint("/run/one"))]


@pytest.mark.parametrize("early", [False, True])
def test_a_report_whose_checkpoint_could_not_be_saved_is_told_without(early: bool) -> None:
    run = Watched()
    run.report(0, 1, saves=True)
    if early:
        run.callbacks.unsaved(FIRST, 1)
    run.report(1, 1, saves=True)
    if not early:
        assert not run.told
        run.callbacks.unsaved(FIRST, 1)
    assert run.told == [([1, 11], None)]


def test_reports_whose_checkpoints_no_longer_come_are_told_when_their_workers_are_replaced() -> None:
    run = Watched()
    for rank in (0, 1):
        run.report(rank, 1, saves=True)
    run.report(0, 2)
    run.start(1)
    run.report(0, 1, of=SECOND)
    assert run.told == [([1, 11], None), ([1], None)]
    run.callbacks.committed(FIRST, 1, "/run/one")
    run.callbacks.close()
    assert not run.told


def test_reports_whose_checkpoints_no_longer_come_are_told_at_the_end() -> None:
    run = Watched()
    for rank in (0, 1):
        run.report(rank, 1, saves=True)
    run.callbacks.close()
    assert run.told == [([1, 11], None)]


def test_the_failures_of_an_incident_are_told_at_once() -> None:
    run = Watched()
    run.failed(1)
    for phase in ("settling", "stopping"):
        run.callbacks.record(c.PhaseChanged(0.0, phase, 1))
        run.failed(0)
        assert not run.seen.failures
    run.callbacks.record(c.PhaseChanged(0.0, "placing", 1))
    run.callbacks.record(c.PhaseChanged(0.0, "starting", 2))
    assert run.seen.failures == [[0, 1]]
