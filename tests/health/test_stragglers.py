"""Who is called slow, and who is not: by values alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from everstep.health.stragglers import WINDOW, Pace, Slowness, Straggler, Stragglers

Found = list[tuple[int, list[Straggler], list[Straggler]]]
"""(step, who has become slow, who isn't any more)."""


def computing(seconds: float) -> Pace:
    return Pace(0.0, seconds, 0.0, 0.0, 0.0, True)


def loading(seconds: float) -> Pace:
    return Pace(0.0, 0.5, 0.0, seconds - 0.5, 0.0, True)


def sleeping(seconds: float) -> Pace:
    return Pace(0.0, 0.1, 0.0, 0.0, 0.0, False)


class Run:
    """Ranks that wait for each other at the end of each step. ``own`` says what a rank's step takes it."""

    def __init__(self, ranks: int, hosts: int = 1, least_s: float = 0.0) -> None:
        self.hosts = {rank: f"host-{rank * hosts // ranks}" for rank in range(ranks)}
        self.watch = Stragglers(self.hosts, least_s)
        self.at = 0

    def steps(
        self,
        count: int,
        seconds: Callable[[int], float],
        kind: Callable[[float], Pace] = computing,
        queued: Callable[[int], float] = lambda rank: 0.0,
    ) -> Found:
        found = []
        for _ in range(count):
            self.at += 1
            own = {rank: (seconds(rank), queued(rank)) for rank in self.hosts}
            step = max(map(sum, own.values()))
            for rank, (mine, waits) in own.items():
                pace = kind(mine)
                waited = 0.0 if pace.hides else step - mine - waits
                pace = Pace(step, pace.ran, waits, pace.data, waited, pace.hides)
                slow, over = self.watch.add(rank, self.at, pace)
                if slow or over:
                    found.append((self.at, slow, over))
        return found


def noisy(seed: int, noise: float, slow: dict[int, float] | None = None) -> Callable[[int], float]:
    chance = random.Random(seed)
    return lambda rank: (1.0 + (slow or {}).get(rank, 0.0)) * (1.0 + chance.uniform(-noise, noise))


@given(st.integers(0, 1 << 32), st.integers(2, 9), st.data())
@settings(max_examples=60)
def test_a_rank_that_is_a_fifth_slower_is_named_within_20_steps_and_nobody_else(
    seed: int, ranks: int, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, ranks - 1))
    run = Run(ranks)
    ((at, named, over),) = run.steps(100, noisy(seed, 0.05, {slow: 0.2}))
    assert at <= 20
    assert not over
    (one,) = named
    assert (one.ranks, one.kind) == ((slow,), Slowness.COMPUTING)
    assert one.slower == pytest.approx(0.2, abs=0.07)


@given(st.integers(0, 1 << 32), st.integers(2, 9))
@settings(max_examples=60)
def test_noise_names_nobody(seed: int, ranks: int) -> None:
    assert Run(ranks).steps(200, noisy(seed, 0.3)) == []


@given(st.integers(0, 1 << 32), st.integers(2, 9))
@settings(max_examples=30)
def test_who_recovers_is_told_once_and_so_is_who_becomes_slow_again(seed: int, ranks: int) -> None:
    run = Run(ranks)
    assert len(run.steps(40, noisy(seed, 0.05, {0: 0.3}))) == 1
    ((_, named, over),) = run.steps(80, noisy(seed, 0.05))
    assert not named
    assert [one.ranks for one in over] == [(0,)]
    assert run.watch.named == []
    ((_, named, _),) = run.steps(40, noisy(seed, 0.05, {0: 0.3}))
    assert [one.ranks for one in named] == [(0,)]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (computing, Slowness.COMPUTING),
        (loading, Slowness.DATA),
        (sleeping, Slowness.OTHER),
    ],
)
def test_what_takes_it_longer_is_told(kind: Callable[[float], Pace], told: Slowness) -> None:
    ((_, named, _),) = Run(4).steps(40, noisy(1, 0.05, {2: 0.5}), kind)
    assert [(one.ranks, one.kind) for one in named] == [((2,), told)]


def test_a_rank_that_does_more_and_waits_all_the_same_holds_up_nobody() -> None:
    """As rank 0 does, which writes logs while all of them wait for their accelerators."""
    run = Run(4)
    chance = random.Random(1)
    for at in range(100):
        for rank in range(4):
            work = (0.4 if rank == 0 else 0.2) * chance.uniform(0.95, 1.05)
            assert run.watch.add(rank, at, Pace(1.0, work, 0.0, 0.0, 0.0, True)) == ([], [])


def test_of_ranks_that_wait_out_of_sight_one_that_sleeps_is_not_guessed_at() -> None:
    run = Run(3)
    for at in range(100):
        for rank in range(3):
            assert run.watch.add(rank, at, Pace(1.0, 0.2, 0.0, 0.0, 0.0, True)) == ([], [])


def test_a_busy_host_is_named_with_all_of_its_ranks() -> None:
    run = Run(6, hosts=3)
    chance = random.Random(2)

    def queued(rank: int) -> float:
        return chance.uniform(0.25, 0.45) if rank in (2, 3) else chance.uniform(0.0, 0.1)

    ((at, named, _),) = run.steps(60, noisy(2, 0.05), queued=queued)
    assert at <= 20
    assert [(one.ranks, one.kind) for one in named] == [((2, 3), Slowness.BUSY_HOST)]


def test_a_rank_that_is_slow_in_two_ways_is_named_once() -> None:
    run = Run(3, hosts=3)
    found = run.steps(60, noisy(8, 0.05, {1: 0.5}), queued=lambda rank: 0.5 if rank == 1 else 0.0)
    assert [one.ranks for _, named, _ in found for one in named] == [(1,)]


def test_ranks_of_one_host_that_get_no_processor_are_not_compared_with_each_other() -> None:
    run = Run(4)
    assert run.steps(60, noisy(3, 0.05), queued=lambda rank: 0.5 if rank == 1 else 0.0) == []


def test_two_slow_ranks_of_many_are_both_named() -> None:
    run = Run(8)
    found = run.steps(40, noisy(4, 0.05, {1: 0.3, 6: 0.6}))
    assert sorted(one.ranks for _, named, _ in found for one in named) == [(1,), (6,)]


def test_nobody_is_judged_by_a_moment() -> None:
    run = Run(3, least_s=100.0)
    ((at, *_),) = run.steps(100, lambda rank: 6.0 if rank == 1 else 4.0)
    assert at == WINDOW
    hasty = Run(3, least_s=100.0)
    assert hasty.steps(100, lambda rank: 0.6 if rank == 1 else 0.4) == []


def test_steps_that_one_rank_says_nothing_of_are_left_out() -> None:
    run = Run(2)
    for at in range(1000, 1100):
        assert run.watch.add(at % 2, at, computing(1.0 + at % 2)) == ([], [])
    ((_, named, _),) = run.steps(40, noisy(5, 0.05, {1: 0.3}))
    assert [one.ranks for one in named] == [(1,)]


def test_steps_that_are_told_together_count_for_as_long_as_they_took() -> None:
    run = Run(2, least_s=10.0)
    for at in range(WINDOW):
        run.watch.add(0, at, Pace(0.03, 0.02, 0.0, 0.0, 0.0, True, steps=64))
        slow, _ = run.watch.add(1, at, Pace(0.03, 0.03, 0.0, 0.0, 0.0, True, steps=64))
    assert [one.ranks for one in slow] == [(1,)]


def test_one_step_that_takes_very_long_makes_nobody_slow() -> None:
    run = Run(3)
    assert run.steps(30, noisy(6, 0.05)) == []
    assert run.steps(1, lambda rank: 500.0 if rank == 1 else 1.0) == []
    assert run.steps(60, noisy(6, 0.05)) == []


def test_who_an_earlier_driver_has_named_is_not_named_again_and_is_cleared() -> None:
    run = Run(3)
    run.watch = Stragglers(run.hosts, 0.0, [Straggler((1,), Slowness.COMPUTING, 0.3)])
    assert run.steps(40, noisy(7, 0.05, {1: 0.3})) == []
    ((_, _, over),) = run.steps(60, noisy(7, 0.05))
    assert [one.ranks for one in over] == [(1,)]


def test_ranks_that_get_far_ahead_are_not_kept_for_ever() -> None:
    run = Run(2)
    for at in range(20_000):
        run.watch.add(0, at, computing(1.0))
    assert len(run.watch._coming) <= 1 << 13


def test_one_rank_alone_is_nobody_s_peer() -> None:
    assert Run(1).steps(40, lambda rank: 1.0) == []
