"""Replica groups: what a replacement costs, what it leaves behind when it fails, and how few may go on."""

from __future__ import annotations

import pytest
from hands import Hands, views

from everstep.control import commands as c
from everstep.control.controller import Settings
from everstep.control.deadlines import Deadlines
from everstep.control.events import TimerName
from everstep.control.failures import Budget, Kind
from everstep.control.table import Phase


def groups(count: int, **more: object) -> Settings:
    size = more.get("group_size", 1)
    assert isinstance(size, int)
    given = {"workers_min": count * size, "workers_max": count * size, "group_size": size, "max_failures": -1}
    return Settings(deadlines=Deadlines(together_s=0.0), **{**given, **more})  # type: ignore[arg-type]


def spent(hands: Hands) -> dict[Budget, int]:
    return {budget: count for budget, count in hands.brain.budgets.spent.items() if count}


# The two findings of the review of Ray Train's own version.


def test_a_failed_partial_replacement_causes_no_unrecoverable_retry_loop() -> None:
    hands = Hands(groups(3), views("a", "b", "c"))
    hands.silent.add(c.StartWorkers)
    hands.fail(1)
    pauses = []
    for _ in range(2):  # its replacement dies while starting, and is tried again after a pause that grows
        hands.forget()
        hands.fail(1, Kind.SIGNAL)
        pauses.append(hands.last(c.RecoveryDecided).pause_s)
        assert hands.last(c.RecoveryDecided).groups == (1,)
        assert [stop.ranks for stop in hands.all(c.StopWorkers)] == [frozenset({1})]
        hands.pass_time(pauses[-1])
        assert [a.rank for a in hands.last(c.StartWorkers).assignments] == [1]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 0
    hands.forget()
    hands.fail(1, Kind.SIGNAL)  # the third time: everything restarts, which could help
    assert {rank for stop in hands.all(c.StopWorkers) for rank in stop.ranks} == {0, 1, 2}
    hands.silent.clear()
    hands.pass_time(60.0)
    assert hands.brain.phase is Phase.RUNNING
    assert hands.brain.epoch == 2
    assert spent(hands) == {Budget.FAILURES: 1, Budget.STARTUP: 3}


def test_new_workers_are_not_orphaned_on_a_failed_replacement() -> None:
    hands = Hands(groups(3, group_size=2), views("a", "b", "c", slots=2))
    hands.silent |= {c.StartWorkers, c.StopWorkers}
    hands.fail(2)
    hands.gone(hands.last(c.StopWorkers))
    begun = hands.last(c.StartWorkers)
    assert [a.rank for a in begun.assignments] == [2, 3]
    hands.ready(2)  # one of the two is there, when the other dies
    hands.forget()
    hands.fail(3, Kind.SIGNAL)
    stop = hands.last(c.StopWorkers)
    assert (stop.ranks, stop.generation) == (frozenset({2, 3}), dict(begun.generations)[1])
    assert not hands.all(c.StartWorkers), "nobody starts before the last one's processes are gone"
    hands.gone(stop)
    hands.pass_time(5.0)
    again = hands.last(c.StartWorkers)
    assert [a.rank for a in again.assignments] == [2, 3]
    assert dict(again.generations)[1] == dict(begun.generations)[1] + 1


# What it costs.


def test_a_replacement_spends_a_recovery_of_max_failures() -> None:
    hands = Hands(groups(3, max_failures=1), views("a", "b", "c"))
    hands.fail(0)
    assert spent(hands) == {Budget.FAILURES: 1}
    hands.fail(1)
    assert hands.last(c.EndRun).outcome is c.Outcome.FAILED


def test_a_budget_of_their_own_is_spent_by_replacements_and_then_everything_restarts() -> None:
    hands = Hands(groups(3, max_failures=1, max_replica_failures=2), views("a", "b", "c"))
    for rank in (0, 1):
        hands.fail(rank)
        hands.pass_time(5.0)
    assert spent(hands) == {Budget.REPLICAS: 2}
    assert hands.brain.epoch == 1
    hands.fail(2)
    hands.pass_time(5.0)
    assert spent(hands) == {Budget.REPLICAS: 2, Budget.FAILURES: 1}
    assert (hands.brain.epoch, hands.brain.phase) == (2, Phase.RUNNING)
    hands.fail(2)
    hands.pass_time(5.0)
    assert hands.last(c.EndRun).outcome is c.Outcome.FAILED


# How few may go on.


@pytest.mark.parametrize("least", [1, 2])
def test_groups_without_a_place_are_waited_for_while_enough_others_train(least: int) -> None:
    hands = Hands(groups(3, groups_min=least, workers_min=least), views("a", "b", "c"))
    hands.lose("c.0")
    assert hands.brain.phase is Phase.RUNNING
    hands.lose("b.0")
    hands.pass_time(5.0)
    assert hands.brain.phase is (Phase.RUNNING if least == 1 else Phase.WAITING)
    assert spent(hands) == {Budget.FAILURES: 2}
    hands.capacity(*views("d", "e"))
    assert hands.brain.phase is Phase.RUNNING
    assert len(hands.brain.groups) == 3
    assert hands.brain.epoch == (1 if least == 1 else 2)


def test_a_group_that_is_replaced_where_it_was_does_not_count_as_missing() -> None:
    hands = Hands(groups(3, groups_min=3), views("a", "b", "c"))
    hands.silent.add(c.StartWorkers)
    hands.fail(1)
    hands.capacity()
    assert hands.brain.phase is Phase.RUNNING
    assert hands.brain.epoch == 1


def test_a_noticed_group_leaves_before_its_deadline_though_it_has_nowhere_to_go() -> None:
    hands = Hands(groups(3, migrate_margin_s=10.0), views("a", "b", "c"))
    hands.notice("b.0", 40.0)
    hands.pass_time(29.0)
    assert not hands.all(c.StopWorkers), "it trains on while there is time"
    hands.forget()
    hands.pass_time(1.0)
    assert [stop.ranks for stop in hands.all(c.StopWorkers)] == [frozenset({1})]
    assert not hands.all(c.StartWorkers), "a slice that is about to go isn't worth a start"
    assert spent(hands) == {Budget.PREEMPTION: 1}
    hands.capacity(*views("d"))
    assert [a.host for a in hands.last(c.StartWorkers).assignments] == ["d.0"]
    assert hands.brain.epoch == 1


def test_a_notice_that_comes_to_nothing_gives_the_group_its_old_place_back() -> None:
    hands = Hands(groups(3, migrate_margin_s=10.0), views("a", "b", "c"))
    hands.notice("b.0", 40.0)
    hands.pass_time(30.0)
    hands.forget()
    assert (TimerName.MIGRATE, 0) in hands.timers
    hands.pass_time(10.0 + hands.settings.deadlines.notice_s)
    assert [a.host for a in hands.last(c.StartWorkers).assignments] == ["b.0"]
    assert hands.brain.epoch == 1
