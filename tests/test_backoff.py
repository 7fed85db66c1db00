"""The pause between recoveries grows while nothing is achieved, and is forgotten when something is."""

from __future__ import annotations

from everstep.backoff import Backoff
from everstep.deadlines import Deadlines


def backoff() -> Backoff:
    return Backoff(Deadlines(backoff_first_s=1, backoff_factor=2, backoff_max_s=5, healthy_s=60))


def test_the_first_recovery_is_immediate_and_the_pause_then_grows_to_its_cap() -> None:
    pauses = backoff()
    assert [pauses.next_pause(float(n)) for n in range(6)] == [0, 1, 2, 4, 5, 5]


def test_a_new_checkpoint_makes_the_next_recovery_immediate_again() -> None:
    pauses = backoff()
    pauses.next_pause(0)
    assert pauses.next_pause(1) == 1
    pauses.progressed()
    assert [pauses.next_pause(2), pauses.next_pause(3)] == [0, 1]


def test_a_healthy_stretch_does_so_too_and_a_short_one_does_not() -> None:
    pauses = backoff()
    pauses.next_pause(0)
    pauses.healthy(1)
    assert pauses.next_pause(59) == 1
    pauses.healthy(60)
    assert pauses.next_pause(121) == 0
