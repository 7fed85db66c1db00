"""What ranks say of their own stalls, put together."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.driver.stalls import Stalls
from everstep.identity import Incarnation
from everstep.journal import records
from everstep.journal.ledger import RunLedger

FIRST = Incarnation(1, 0, 0)


def recorded(stalls: Stalls, written: list[Any]) -> float:
    stalls.flush(1000.0, all_=True)
    return sum(record.seconds for record in written)


def new(ledger: RunLedger | None = None) -> tuple[Stalls, list[Any]]:
    written: list[Any] = []
    return Stalls(written.append, ledger or RunLedger()), written


def test_ranks_that_save_at_the_same_report_stand_still_together() -> None:
    stalls, written = new()
    for rank, seconds in enumerate((1.0, 3.0, 2.0)):
        stalls.add(FIRST, 7, seconds, 10.0 + rank, [7, 7])
    stalls.add(FIRST, 8, 0.5, 20.0, [8, 8])
    assert recorded(stalls, written) == 3.5
    assert (written[-1].at, written[-1].upto) == (20.0, 8)


def test_a_rank_that_the_others_do_not_wait_for_stands_still_alone() -> None:
    stalls, written = new()
    stalls.add(FIRST, 7, 3.0, 10.0, [9, 30])
    assert recorded(stalls, written) == 1.0


def test_little_is_recorded_seldom() -> None:
    stalls, written = new()
    stalls.add(FIRST, 1, 0.1, 10.0)
    stalls.flush(10.2)
    assert written == []
    stalls.add(FIRST, 2, 0.2, 11.0)
    stalls.flush(11.2)
    assert [record.seconds for record in written] == [pytest.approx(0.3)]
    stalls.add(FIRST, 3, 0.1, 12.0)
    stalls.flush(22.0)
    assert len(written) == 2


def test_what_an_earlier_driver_has_recorded_is_not_counted_again() -> None:
    ledger = RunLedger()
    ledger.apply(records.Stalled(5.0, *FIRST, 7, 2.0))
    stalls, written = new(ledger)
    stalls.add(FIRST, 7, 2.0, 10.0)
    assert recorded(stalls, written) == 0.0
    stalls.add(FIRST, 8, 2.0, 11.0)
    assert recorded(stalls, written) == 2.0


def test_what_the_last_workers_said_is_recorded_before_the_next_start() -> None:
    stalls, written = new()
    stalls.add(FIRST, 3, 0.1, 10.0)
    stalls.restart(2, 11.0)
    assert [record.epoch for record in written] == [1]
    stalls.add(Incarnation(2, 0, 0), 1, 0.1, 12.0)
    assert recorded(stalls, written) == pytest.approx(0.2)
