"""What a host stamps with its own monotonic clock, read on the driver's."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given, strategies as st

from everstep.backend.base import NoBackend
from everstep.driver.exits import failure_of
from everstep.engine.ray.clocks import HostClock
from everstep.failures import Incident
from everstep.protocol import framing, wire

HOUR = 3600.0


def clock_of(ahead: float, *trips: tuple[float, float, float]) -> HostClock:
    """After questions at these times of ours: when asked, how long the way there, how long the way back."""
    clock = HostClock()
    for asked, there, back in trips:
        clock.answered(asked + there + ahead, asked, asked + there + back)
    return clock


@given(
    ahead=st.floats(-1e7, 1e7),
    there=st.floats(0.0, 1.0),
    back=st.floats(0.0, 1.0),
    ago=st.floats(0.0, 1e4),
)
def test_a_time_is_off_by_half_a_round_trip_at_most(
    ahead: float, there: float, back: float, ago: float
) -> None:
    now = time.monotonic()
    clock = clock_of(ahead, (now - 2.0, there, back))
    happened = now - ago
    assert abs(clock.ours(happened + ahead) - happened) <= (there + back) / 2 + 1e-6


def test_the_quickest_answer_counts_most_until_it_is_old() -> None:
    start = time.monotonic() - HOUR
    quick, slow = (start, 0.001, 0.001), (start + 1.0, 1.0, 0.0)
    assert clock_of(500.0, quick, slow).ours(start + 500.0) == pytest.approx(start, abs=1e-6)
    # The machine was paused for a while after that: its clock stood still, or ours did.
    clock = clock_of(500.0, quick)
    later = start + 600.0
    clock.answered(later + 480.0, later - 0.02, later + 0.02)
    assert clock.ours(later + 480.0) == pytest.approx(later, abs=1e-6)


def test_nothing_that_is_told_lies_in_the_future() -> None:
    before = time.monotonic()
    clock = clock_of(0.0, (before - 3.0, 2.0, 0.0))
    assert before <= clock.ours(before + 10.0) <= time.monotonic()
    assert HostClock().ours(before + 10.0) <= time.monotonic(), "a clock that was never asked"


def exited(rank: int, at: float) -> wire.Exited:
    [body] = framing.Frames().feed(
        framing.frame(wire.Exited(1, 0, rank, at, 1, None, False, False, 0, "", f"rank-{rank}.log"))
    )
    return msgspec.convert(wire.from_agent.decode(body), wire.Exited)


@pytest.mark.parametrize("ahead", [3000.0, -3000.0], ids=["booted earlier", "booted later"])
def test_what_failed_first_is_the_cause_whatever_its_host_calls_the_time(ahead: float) -> None:
    """As it comes over the wire from two hosts, of which one has our clock."""
    now = time.monotonic()
    clocks = [clock_of(0.0, (now, 0.001, 0.001)), clock_of(ahead, (now, 0.001, 0.001))]
    told = [exited(0, now - 1.0), exited(1, now - 2.0 + ahead)]
    failures = [
        failure_of(message, f"host-{message.rank}", clock.ours(message.at), NoBackend())
        for message, clock in zip(told, clocks, strict=True)
    ]
    incident = Incident(failures[0], now)
    incident.add(failures[1])
    assert incident.cause.rank == 1
    assert incident.cause.at == pytest.approx(now - 2.0, abs=0.01)
