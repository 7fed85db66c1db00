"""Output about the failure of another rank comes after the cause."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.control import commands as c
from everstep.control.budgets import Budget
from everstep.driver.echoes import EchoesHeld
from everstep.failures import Failure, Kind
from everstep.protocol import wire

CAUSE = Failure(Kind.SIGNAL, 1.0, "killed by SIGKILL", rank=1)
ECHO = Failure(Kind.EXCEPTION, 1.0, "connection reset", rank=0, echo=True)
TRACEBACK = wire.Output(0, "Traceback", echo=True)


class Shown:
    def __init__(self) -> None:
        self.text: list[str] = []
        observer: Any = self
        self.echoes = EchoesHeld(observer)

    def output(self, rank: int, text: str) -> None:
        self.text.append(text)


def test_a_traceback_that_is_an_echo_waits_for_the_cause() -> None:
    shown = Shown()
    shown.echoes.output(TRACEBACK)
    shown.echoes.recorded(c.FailureSeen(1.0, ECHO))
    shown.echoes.recorded(c.PhaseChanged(1.0, "settling", 1))
    shown.echoes.output(wire.Output(2, "step 3"))
    assert shown.text == ["step 3"], "what others print is shown at once"
    shown.echoes.recorded(c.FailureSeen(1.1, CAUSE))
    assert shown.text == ["step 3", "Traceback"]
    shown.echoes.output(wire.Output(0, "more of it", echo=True))
    assert shown.text[-1] == "more of it"


@pytest.mark.parametrize(
    "decision",
    [
        c.RecoveryDecided(2.0, ECHO, Budget.FAILURES, 1, 3, (), 0.0),
        c.PhaseChanged(2.0, "stopping", 1),
        c.PhaseChanged(2.0, "ended", 1),
    ],
)
def test_where_no_cause_comes_it_is_shown_all_the_same(decision: c.Record) -> None:
    shown = Shown()
    shown.echoes.output(TRACEBACK)
    shown.echoes.recorded(decision)
    assert shown.text == ["Traceback"]


def test_the_next_failure_is_another_one() -> None:
    shown = Shown()
    shown.echoes.recorded(c.FailureSeen(1.0, CAUSE))
    shown.echoes.recorded(c.PhaseChanged(3.0, "running", 2))
    shown.echoes.output(TRACEBACK)
    assert shown.text == []
