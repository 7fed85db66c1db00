"""The table of phases, and the table of events."""

from __future__ import annotations

from everstep.control import events as e
from everstep.control.controller import HANDLERS, TIMED_OUT, WORKER_HANDLERS
from everstep.control.table import TRANSITIONS, Phase


def test_every_phase_can_be_reached_and_left() -> None:
    assert {b for _, b in TRANSITIONS} == set(Phase) - {Phase.NEW}
    assert {a for a, _ in TRANSITIONS} == set(Phase) - {Phase.ENDED}


def test_every_phase_that_is_not_the_end_can_be_stopped() -> None:
    assert {a for a, b in TRANSITIONS if b is Phase.ENDING} == set(Phase) - {Phase.ENDING, Phase.ENDED}


def test_something_is_done_about_every_event() -> None:
    def kinds(of: type[e.Event]) -> set[type[e.Event]]:
        return {of}.union(*map(kinds, of.__subclasses__()))

    of_workers = kinds(e.WorkerEvent)
    assert of_workers - WORKER_HANDLERS.keys() == {e.WorkerEvent}
    assert kinds(e.Event) - of_workers - HANDLERS.keys() == {e.Event}


def test_a_timer_of_which_nothing_is_done_ends_a_wait() -> None:
    only_waits = {e.TimerName.SETTLE, e.TimerName.FINISH_REPORT, e.TimerName.BACKOFF, e.TimerName.GROW}
    assert set(e.TimerName) - TIMED_OUT.keys() == {*only_waits, e.TimerName.BOUNDARY}
