"""How far workers have come, as the controller is told of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.control import events as e
from everstep.control.settings import Settings
from everstep.driver.driven import DrivenRun
from everstep.process.clock import MachineClock


@pytest.fixture
def told() -> list[e.Event]:
    return []


@pytest.fixture
def run(told: list[e.Event]) -> DrivenRun:
    job: Any = SimpleNamespace(settings=lambda: Settings(workers_min=2, workers_max=2), marker="")
    lease, observer = SimpleNamespace(journal=None, history=None), SimpleNamespace(say=None)
    anything = cast(Any, None)
    run = DrivenRun(job, anything, anything, cast(Any, lease), cast(Any, observer), MachineClock())
    run.connect(lambda command: None, told.append, lambda record: None)
    return run


def upto(rank: int, index: int, at: float = 0.0) -> e.Reported:
    return e.Reported(at=at, epoch=1, generation=0, rank=rank, upto=index)


def test_the_last_of_several_in_one_turn_says_it_all(run: DrivenRun, told: list[e.Event]) -> None:
    async def turns() -> None:
        for event in (upto(0, 1, 1.0), upto(1, 1, 2.0), upto(0, 2, 3.0)):
            run.emit_progress(event)
        assert told == []
        await asyncio.sleep(0)
        assert told == [upto(1, 1, 2.0), upto(0, 2, 3.0)], "each worker once, in the order of their times"
        run.emit_progress(upto(0, 3))
        await asyncio.sleep(0)
        assert told[2:] == [upto(0, 3)]

    asyncio.run(turns())


def test_it_is_told_before_any_other_event(run: DrivenRun, told: list[e.Event]) -> None:
    async def turns() -> None:
        run.emit_progress(upto(0, 1))
        gone = e.WorkersGone(at=1.0, host="host", epoch=1, generation=0, ranks=frozenset({0}))
        run.emit(gone)
        assert told == [upto(0, 1), gone]
        await asyncio.sleep(0)
        assert told == [upto(0, 1), gone], "and not again"

    asyncio.run(turns())
