"""A driver that did not run for a while hears what happened meanwhile before it does what is due."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from everstep.control import commands as c, events as e
from everstep.deadlines import Deadlines
from everstep.driver.driven import DrivenRun
from everstep.driver.timers import Timers
from everstep.errors import FencedError
from everstep.sim.seats import ProcessClock
from everstep.sim.time import Process, VirtualTime

MIGRATE, KILL = e.TimerName.MIGRATE, e.TimerName.KILL


class Run:
    """What timers need of a driver, in virtual time."""

    limits = Deadlines()

    def __init__(self) -> None:
        self.time = VirtualTime()
        self.process = Process(self.time, "driver")
        self.clock = ProcessClock(self.time, 0.0, 0.0)
        self.told: list[tuple[float, str]] = []
        self.is_ours = True
        self.on_fired: Callable[[e.TimerFired], object] = lambda event: None
        self.timers = Timers(cast(DrivenRun, self))

    def set(self, timer: e.TimerName, at: float) -> None:
        self.process.do(lambda: self.timers.set(c.SetTimer(timer, 0, at)))

    def message(self, at: float, then: Callable[[], object] = lambda: None) -> None:
        """One that arrives then."""
        self.time.at(at, lambda: (self._tell("message"), then()), self.process)

    def sleep(self, at: float, seconds: float) -> None:
        self.time.at(at, lambda: self.process.pause(seconds))

    def emit(self, event: e.Event) -> None:
        assert isinstance(event, e.TimerFired)
        self._tell(event.timer.value)
        self.on_fired(event)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def until_fenced() -> None:
            try:
                await work
            except FencedError:
                self._tell("fenced")

        self.process.run(until_fenced())

    async def look_at_lease(self, limit_s: float) -> bool:
        self._tell("lease")
        if not self.is_ours:
            raise FencedError("another driver")
        return True

    def _tell(self, what: str) -> None:
        self.told.append((self.time.now, what))

    def until(self, at: float) -> list[str]:
        try:
            self.time.run(at)
        finally:
            self.process.bury()
        return [what for _, what in self.told]


def test_a_timer_fires_when_it_is_due() -> None:
    run = Run()
    run.set(KILL, 10.0)
    run.until(20.0)
    assert run.told == [(10.0, "kill")]


@pytest.mark.parametrize("wakes", [10.5, 60.0])
def test_after_a_gap_the_lease_and_the_messages_come_before_what_was_due(wakes: float) -> None:
    run = Run()
    run.set(MIGRATE, 10.0)
    run.sleep(5.0, wakes - 5.0)
    run.message(wakes + 1.0)
    assert run.until(100.0) == ["lease", "message", "migrate"]
    silent_s = run.limits.heartbeat_timeout_s
    assert run.told[-1][0] > wakes + silent_s  # a host that does not speak counts as lost by then


def test_what_is_heard_after_a_gap_can_cancel_or_move_a_timer() -> None:
    run = Run()
    run.set(KILL, 10.0)
    run.set(MIGRATE, 11.0)
    run.sleep(5.0, 55.0)
    run.message(60.5, lambda: (run.timers.cancel(KILL, 0), run.set(MIGRATE, 90.0)))
    run.until(200.0)
    assert run.told[-1] == (90.0, "migrate")
    assert "kill" not in [what for _, what in run.told]


def test_of_timers_that_waited_each_may_cancel_the_next() -> None:
    run = Run()
    run.set(KILL, 10.0)
    run.set(MIGRATE, 11.0)
    run.on_fired = lambda event: run.timers.cancel(MIGRATE, 0)
    run.sleep(5.0, 55.0)
    assert run.until(200.0) == ["lease", "kill"]


def test_a_driver_that_was_replaced_while_it_slept_does_nothing_that_was_due() -> None:
    run = Run()
    run.is_ours = False
    run.set(KILL, 10.0)
    run.sleep(5.0, 55.0)
    assert run.until(200.0) == ["lease", "fenced"]


def test_a_driver_that_falls_asleep_again_looks_at_its_lease_again() -> None:
    run = Run()
    run.set(KILL, 10.0)
    run.sleep(5.0, 15.0)
    run.sleep(21.0, 30.0)
    assert run.until(200.0) == ["lease", "lease", "kill"]
