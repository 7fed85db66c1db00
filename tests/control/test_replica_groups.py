"""Replica groups: what a replacement costs, what it leaves behind when it fails, and how few may go on."""

from __future__ import annotations

import pytest
from hands import Hands, stage, views

from everstep.control import commands as c, events as e
from everstep.control.budgets import Budget
from everstep.control.controller import Settings
from everstep.control.events import TimerName
from everstep.control.table import Phase
from everstep.deadlines import Deadlines
from everstep.failures import Kind


def groups(count: int, **more: object) -> Settings:
    size = more.get("group_size", 1)
    assert isinstance(size, int)
    given = {"workers_min": count * size, "workers_max": count * size, "group_size": size, "max_failures": -1}
    return Settings(deadlines=Deadlines(together_s=0.0), **{**given, **more})  # type: ignore[arg-type]


def spent(hands: Hands) -> dict[Budget, int]:
    return {budget: count for budget, count in hands.state.budgets.spent.items() if count}


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


def test_a_replacement_that_fails_before_its_first_step_again_and_again_restarts_everything() -> None:
    hands = Hands(groups(3), views("a", "b", "c"))
    hands.fail(1)
    for _ in range(2):  # it is ready, and fails before it reports: its state can't be had from its peers
        hands.pass_time(10.0)
        assert (hands.brain.epoch, hands.brain.phase) == (1, Phase.RUNNING)
        hands.forget()
        hands.fail(1)
        assert {rank for stop in hands.all(c.StopWorkers) for rank in stop.ranks} == {1}
    hands.pass_time(10.0)
    hands.forget()
    hands.fail(1)
    assert {rank for stop in hands.all(c.StopWorkers) for rank in stop.ranks} == {0, 1, 2}
    hands.pass_time(10.0)
    assert (hands.brain.epoch, hands.brain.phase) == (2, Phase.RUNNING)
    assert spent(hands) == {Budget.FAILURES: 4}


@pytest.mark.parametrize("progress", ["a report", "time"])
def test_a_replacement_that_got_to_train_is_replaced_again_as_often_as_the_budget_allows(
    progress: str,
) -> None:
    hands = Hands(groups(3), views("a", "b", "c"))
    for n in range(1, 10):
        hands.fail(1)
        hands.pass_time(10.0)
        if progress == "a report":
            hands.report(1, n)
        else:
            hands.pass_time(hands.settings.deadlines.healthy_s)
    assert (hands.brain.epoch, hands.brain.phase) == (1, Phase.RUNNING)


def test_that_groups_go_on_without_a_checkpoint_is_told_once_before_their_steps_are_lost() -> None:
    hands = Hands(groups(3), views("a", "b", "c"))
    hands.fail(1)
    assert hands.last(c.RecoveryDecided).unsaved == 0, "nobody has reported, so that nothing can be lost"
    for step in range(1, 8):
        hands.report(0, step)
        hands.report(2, step)
    hands.pass_time(10.0)
    hands.fail(1)
    assert hands.last(c.RecoveryDecided).unsaved == 7
    hands.pass_time(10.0)
    hands.report(1, 1)
    hands.fail(2)
    assert hands.last(c.RecoveryDecided).unsaved == 0, "it has been told"


def test_groups_that_have_saved_are_not_warned_about() -> None:
    hands = Hands(groups(3), views("a", "b", "c"))
    hands.checkpoint(1)
    hands.report(0, 2)
    hands.fail(1)
    assert hands.last(c.RecoveryDecided).unsaved == 0


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


# Groups that have no place yet.


def elastic(size: int = 1) -> Settings:
    return groups(3, workers_min=size, group_size=size)


@pytest.mark.parametrize(("hosts", "slots", "size"), [(1, 1, 1), (2, 1, 2), (2, 2, 2), (1, 2, 1)])
def test_groups_without_a_place_at_the_start_join_later_and_nobody_stops_for_them(
    hosts: int, slots: int, size: int
) -> None:
    per_slice = hosts * slots
    settings = groups(3 * per_slice // size, workers_min=per_slice, group_size=size)
    hands = Hands(settings, views("a", hosts=hosts, slots=slots))
    first = hands.last(c.StartWorkers)
    assert [a.rank for a in first.assignments] == list(range(per_slice))
    numbers = {(a.world_size, a.num_groups, a.num_slices, a.num_nodes) for a in first.assignments}
    assert numbers == {(3 * per_slice, 3 * per_slice // size, 3, 3 * hosts)}
    for n, name in enumerate("bc", 1):
        hands.forget()
        hands.capacity(*views(name, hosts=hosts, slots=slots))
        start = hands.last(c.StartWorkers)
        assert [a.rank for a in start.assignments] == list(range(n * per_slice, (n + 1) * per_slice))
        assert {(a.slice, a.slice_id) for a in start.assignments} == {(name, n)}
        assert {a.node_rank for a in start.assignments} == set(range(n * hosts, (n + 1) * hosts))
        told = hands.last(c.GroupStarted)
        assert (told.world_size, told.num_slices) == ((n + 1) * per_slice, n + 1), "those that train now"
        assert not hands.all(c.StopWorkers)
    assert (hands.brain.epoch, hands.brain.phase) == (1, Phase.RUNNING)
    assert spent(hands) == {}


def test_a_run_ends_when_those_that_have_a_place_have_returned() -> None:
    hands = Hands(elastic(), views("a", "b"))
    hands.returns(0, 1)
    assert hands.last(c.EndRun).outcome is c.Outcome.FINISHED


def test_after_a_full_restart_those_without_a_place_wait_for_one() -> None:
    hands = Hands(elastic(), views("a", "b", "c"))
    hands.silent.add(c.StopWorkers)
    for rank in (0, 1, 2):
        hands.fail(rank)
    hands.lose("b.0")
    hands.silent.clear()
    for stop in hands.all(c.StopWorkers):
        hands.gone(stop)
    hands.pass_time(5.0)
    assert [a.rank for a in hands.last(c.StartWorkers).assignments] == [0, 1]
    assert hands.brain.epoch == 2
    hands.capacity(*views("d"))
    assert [(a.rank, a.host) for a in hands.last(c.StartWorkers).assignments] == [(2, "d.0")]
    assert hands.brain.epoch == 2


@pytest.mark.parametrize("outdated", [False, True])
def test_a_driver_that_takes_over_starts_the_groups_that_are_missing(outdated: bool) -> None:
    before = Hands(elastic(2), views("a", "b", "c", hosts=2))
    kept = tuple(a for _, a in sorted(before.places.items()) if a.group_id != 1)
    adopted = e.Adopted(1, kept, ((0, 0), (1, 4), (2, 1)), outdated)
    hands = Hands(
        elastic(2),
        views("a", "b", "c", "d", hosts=2),
        e.RunOpened(at=0.0, last_epoch=1, adopted=adopted),
    )
    assert not hands.all(c.StopWorkers)
    if outdated:  # an epoch never mixes two versions of the code: it waits for the change-over
        assert not hands.all(c.StartWorkers)
        return
    start = hands.last(c.StartWorkers)
    assert [(a.rank, a.slice_id) for a in start.assignments] == [(2, 1), (3, 1)]
    assert {a.slice for a in start.assignments} <= {"b", "d"}
    assert start.generations == ((1, 5),), "what the last one was called isn't used again"
    assert hands.last(c.GroupsStarting).generations == ((1, 5),)
    assert hands.brain.epoch == 1


def test_too_few_groups_at_a_take_over_are_ended_and_all_wait() -> None:
    settings = groups(3, workers_min=2, groups_min=2)
    before = Hands(settings, views("a", "b", "c"))
    opened = e.RunOpened(at=0.0, last_epoch=1, adopted=e.Adopted(1, (before.places[0],), ((0, 0),)))
    hands = Hands(settings, views("a"), opened)
    assert [stop.ranks for stop in hands.all(c.StopWorkers)] == [frozenset({0})]
    assert hands.brain.phase is Phase.WAITING
    hands.capacity(*views("b"))
    assert [a.rank for a in hands.last(c.StartWorkers).assignments] == [0, 1]


def test_a_restart_of_everything_is_told_from_the_failure_that_made_it_necessary() -> None:
    hands = Hands(Settings(workers_min=1, workers_max=2, group_size=1, max_failures=-1), views("a", "b"))
    hands.lose("a.0")
    hands.pass_time(1000.0)
    assert stage(hands) is Phase.WAITING
    hands.fail(1)
    hands.pass_time(5.0)
    hands.report(0, 1)
    told = hands.last(c.Recovered)
    assert told.cause is not None
    assert (told.cause.message, told.total_s) == ("boom", pytest.approx(5.0))


def test_the_seconds_add_up_where_groups_that_wait_become_too_many() -> None:
    hands = Hands(groups(3, groups_min=2, workers_min=2), views("a", "b", "c"))
    hands.lose("b.0")
    hands.pass_time(5.0)
    hands.lose("c.0")
    hands.pass_time(5.0)
    hands.capacity(*views("d", "e"))
    for rank in range(3):
        hands.report(rank, 1)
    told = hands.last(c.Recovered)
    assert told.cause is not None
    assert told.total_s == pytest.approx(hands.now - told.cause.at)
