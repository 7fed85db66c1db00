"""Growing, and preemption: workers that could train on are moved, without losing what they have."""

from __future__ import annotations

import msgspec
import pytest
from hands import Hands, Run, views

from everstep.control import commands as c, events as e
from everstep.control.budgets import Budget
from everstep.control.commands import AskReason, Rung
from everstep.control.controller import Controller, Settings, beliefs_of
from everstep.control.table import Phase
from everstep.deadlines import Deadlines
from everstep.failures import Kind


def elastic(low: int = 1, high: int = 3, **more: object) -> Settings:
    return Settings(workers_min=low, workers_max=high, resize_interval_s=60.0, **more)  # type: ignore[arg-type]


def fixed(workers: int = 2, **more: object) -> Settings:
    return Settings(workers_min=workers, workers_max=workers, **more)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- growing


def test_a_run_grows_at_a_checkpoint_boundary_with_the_new_place_ready_first() -> None:
    hands = Hands(elastic(), views("a"))
    hands.pass_time(100.0)
    hands.forget()
    hands.capacity(*views("b"))
    assert hands.last(c.Reserve).slices == ("b",)
    assert hands.last(c.PrepareHost).host == "b.0"
    assert hands.last(c.AskCheckpoint).reason is AskReason.RESIZE
    assert hands.all(c.StopWorkers) == []
    hands.checkpoint(1)
    assert hands.last(c.GroupStarted).rung is Rung.PLANNED
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k1"
    assert len(hands.last(c.StartWorkers).assignments) == 2
    assert hands.state.moving.asked is AskReason.NONE


def test_a_checkpoint_that_its_ranks_did_not_wait_for_is_no_boundary_to_grow_at() -> None:
    hands = Hands(elastic(), views("a"))
    hands.pass_time(100.0)
    hands.capacity(*views("b"))
    hands.forget()
    # Reported before the rank knew what is wanted: it may be a step further by now.
    hands.report(0, 1, part=True, held=False)
    assert hands.state.saved.checkpoints.newest.folder == "e1-g0-k1"  # type: ignore[union-attr]
    assert hands.all(c.StopWorkers) == []
    hands.report(0, 2, part=True)
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k2"


def test_growing_spends_no_budget() -> None:
    hands = Hands(elastic(), views("a"))
    hands.pass_time(100.0)
    hands.capacity(*views("b"))
    hands.checkpoint(1)
    assert hands.all(c.RecoveryDecided) == []
    assert set(hands.state.budgets.spent.values()) == {0}


def test_a_run_grows_no_more_often_than_the_user_wants() -> None:
    hands = Hands(elastic(), views("a"))
    hands.forget()
    hands.capacity(*views("b"))
    assert hands.all(c.Reserve) == []
    hands.pass_time(59.0)
    assert hands.all(c.Reserve) == []
    hands.pass_time(1.0)
    assert hands.last(c.Reserve).slices == ("b",)


def test_a_reservation_that_fails_leaves_training_undisturbed_and_is_tried_again_later() -> None:
    hands = Hands(elastic(), views("a"))
    hands.pass_time(100.0)
    hands.forget()
    hands.silent.add(c.Reserve)
    hands.capacity(*views("b"))
    hands.reserve_fails()
    hands.capacity()
    assert len(hands.all(c.Reserve)) == 1
    assert hands.all(c.StopWorkers) == hands.all(c.AskCheckpoint) == []
    assert hands.brain.phase is Phase.RUNNING
    hands.silent.clear()
    hands.pass_time(60.0)
    assert len(hands.all(c.Reserve)) == 2


def test_a_preparation_that_hangs_leaves_training_undisturbed_and_gives_the_slice_back() -> None:
    hands = Hands(elastic(), views("a"))
    hands.pass_time(100.0)
    hands.silent.add(c.PrepareHost)
    hands.capacity(*views("b"))
    hands.forget()
    hands.pass_time(hands.settings.deadlines.prepare_s)
    assert hands.last(c.Release).slices == ("b",)
    assert hands.all(c.StopWorkers) == []


def test_a_slice_that_goes_before_the_checkpoint_comes_calls_the_growth_off() -> None:
    hands = Hands(elastic(), views("a"))
    hands.pass_time(100.0)
    hands.capacity(*views("b"))
    hands.forget()
    hands.lose("b.0")
    assert hands.last(c.AskCheckpoint).reason is AskReason.NONE
    hands.checkpoint(1)
    assert hands.all(c.StopWorkers) == []


def test_a_failure_while_the_new_place_is_ready_takes_it_along() -> None:
    hands = Hands(elastic(max_failures=1), views("a"))
    hands.pass_time(100.0)
    hands.capacity(*views("b"))
    hands.forget()
    hands.fail(0)
    assert len(hands.last(c.StartWorkers).assignments) == 2
    assert hands.all(c.Reserve) == []


def test_a_worker_that_complains_while_a_resize_ends_it_costs_nothing() -> None:
    hands = Hands(elastic(high=2), views("a"))
    hands.pass_time(100.0)
    hands.capacity(*views("b"))
    hands.silent.add(c.StopWorkers)
    hands.checkpoint(1)
    hands.fail(0, Kind.EXCEPTION)
    hands.gone(hands.last(c.StopWorkers))
    assert hands.all(c.RecoveryDecided) == []
    assert hands.last(c.GroupStarted).rung is Rung.PLANNED


def test_a_run_that_shrank_grows_back_when_the_slice_returns() -> None:
    hands = Hands(elastic(high=2, max_failures=1), views("a", "b"))
    hands.lose("b.0")
    assert len(hands.last(c.StartWorkers).assignments) == 1
    hands.pass_time(60.0)
    hands.capacity(*views("b"))
    hands.checkpoint(1)
    assert len(hands.last(c.StartWorkers).assignments) == 2


def test_a_notice_for_a_slice_that_we_do_not_use_does_not_keep_us_from_growing() -> None:
    hands = Hands(elastic(high=2), views("a"))
    hands.pass_time(100.0)
    hands.capacity(*views("b", "c"))
    hands.lose("b.0")
    hands.notice("c.0", 10.0)
    hands.pass_time(100.0)
    assert hands.last(c.Reserve).slices == ("c",)


# ---------------------------------------------------------------------- preemption


def test_a_replacement_is_taken_when_the_notice_comes_and_used_shortly_before_the_deadline(
    either: Run,
) -> None:
    hands = either()
    hands.forget()
    hands.notice("b.0", 60.0)
    assert hands.last(c.Reserve).slices == ("c",)
    assert hands.last(c.AskCheckpoint).reason is AskReason.PREEMPTION
    assert hands.all(c.StopWorkers) == []
    hands.checkpoint(1, (0, 1))
    assert hands.all(c.StopWorkers) == []
    hands.pass_time(60.0 - hands.settings.migrate_margin_s)
    start = hands.last(c.StartWorkers)
    assert {a.slice for a in start.assignments} == {"a", "c"}
    assert start.checkpoint == "e1-g0-k1"
    assert {b: n for b, n in hands.state.budgets.spent.items() if n} == {Budget.PREEMPTION: 1}


def test_a_checkpoint_is_asked_for_at_the_notice_and_again_before_leaving_and_then_no_step_is_lost(
    either: Run,
) -> None:
    hands = either()
    hands.notice("b.0", 60.0)
    hands.checkpoint(1, (0, 1))
    assert [ask.reason for ask in hands.all(c.AskCheckpoint)] == [AskReason.PREEMPTION, AskReason.NONE]
    hands.pass_time(60.0 - 2 * hands.settings.migrate_margin_s)
    assert hands.last(c.AskCheckpoint).reason is AskReason.PREEMPTION
    hands.forget()
    hands.checkpoint(2, (0, 1))
    start = hands.last(c.StartWorkers)
    assert {a.slice for a in start.assignments} == {"a", "c"}
    assert start.checkpoint == "e1-g0-k2"


def test_a_short_notice_has_one_checkpoint_and_no_step_is_lost() -> None:
    hands = Hands(fixed(2), views("a", "b", "c"))
    hands.notice("b.0", 16.0)
    assert not hands.all(c.AskCheckpoint)
    hands.pass_time(8.0)
    assert [ask.reason for ask in hands.all(c.AskCheckpoint)] == [AskReason.PREEMPTION]
    hands.checkpoint(1)
    start = hands.last(c.StartWorkers)
    assert {a.slice for a in start.assignments} == {"a", "c"}
    assert start.checkpoint == "e1-g0-k1"


def test_with_nowhere_to_go_one_checkpoint_before_the_deadline_is_enough() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.notice("b.0", 16.0)
    hands.pass_time(11.0)
    assert not hands.all(c.AskCheckpoint)
    hands.pass_time(1.0)
    hands.checkpoint(1)
    assert [ask.reason for ask in hands.all(c.AskCheckpoint)] == [AskReason.PREEMPTION, AskReason.NONE]
    hands.capacity(*views("c"))  # there is, after all, and it is time
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k1"


def test_the_last_checkpoint_waits_for_the_place_to_go_to() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.notice("b.0", 16.0)
    hands.pass_time(10.0)
    assert not hands.all(c.AskCheckpoint)
    hands.capacity(*views("c"))
    assert hands.last(c.AskCheckpoint).reason is AskReason.PREEMPTION
    hands.checkpoint(1)
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k1"


def test_a_refuge_that_is_ready_after_the_checkpoint_is_kept_until_it_is_needed(either: Run) -> None:
    hands = either()
    hands.silent.add(c.PrepareHost)
    hands.notice("b.0", 60.0)
    hands.checkpoint(1, (0, 1))
    hands.tell(e.HostPrepared(at=0.0, host="c.0"))
    assert hands.last(c.AskCheckpoint).reason is AskReason.NONE
    hands.checkpoint(2, (0, 1))
    assert hands.state.fleet.held >= {"a", "b", "c"}
    hands.pass_time(55.0)
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"a", "c"}


def test_a_second_notice_asks_for_a_checkpoint_of_its_own(either: Run) -> None:
    hands = either("c", "d")
    hands.notice("b.0", 60.0)
    hands.checkpoint(1, (0, 1))
    hands.notice("a.0", 61.0)
    assert hands.last(c.AskCheckpoint).reason is AskReason.PREEMPTION


def test_one_host_noticed_means_the_whole_slice() -> None:
    hands = Hands(fixed(2), views("a", "b", hosts=2))
    hands.notice("a.1", 60.0)
    hands.pass_time(55.0)
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"b"}


def test_staggered_notices_lead_to_one_restart(either: Run) -> None:
    hands = either("c", "d")
    hands.forget()
    hands.notice("a.0", 60.0)
    hands.pass_time(5.0)
    hands.notice("b.0", 60.0)
    hands.pass_time(100.0)
    assert len(hands.all(c.StartWorkers)) == 1
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"c", "d"}
    assert hands.state.budgets.spent[Budget.PREEMPTION] == 1


def test_a_cancelled_notice_restarts_nothing_and_gives_the_replacement_back(either: Run) -> None:
    hands = either()
    hands.notice("b.0", 60.0)
    hands.forget()
    hands.tell(e.NoticeCancelled(at=0.0, host="b.0"))
    assert hands.last(c.AskCheckpoint).reason is AskReason.NONE
    assert hands.last(c.Release).slices == ("c",)
    hands.pass_time(200.0)
    assert hands.all(c.StopWorkers) == []
    assert set(hands.state.budgets.spent.values()) == {0}


def test_a_deadline_that_passes_with_the_host_alive_restarts_nothing() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.forget()
    hands.notice("b.0", 60.0)
    hands.pass_time(70.0)
    hands.capacity(*views("c"))
    hands.pass_time(100.0)
    assert hands.all(c.StopWorkers) == []
    assert hands.last(c.PreemptionSeen).deadline is None
    assert hands.state.moving.slices == frozenset()
    assert hands.state.fleet.held == {"a", "b"}


def test_a_host_that_goes_early_spends_the_preemption_budget(either: Run) -> None:
    hands = either()
    hands.notice("b.0", 60.0)
    hands.pass_time(1.0)
    hands.lose("b.0")
    assert {b: n for b, n in hands.state.budgets.spent.items() if n} == {Budget.PREEMPTION: 1}
    assert hands.brain.phase is Phase.RUNNING


def test_a_notice_that_an_earlier_driver_heard_still_counts_when_its_machine_is_gone_before_it_says_so() -> (
    None
):
    before = Hands(fixed(2), views("a", "b", "c"))
    before.notice("b.0", 60.0)
    seen = before.last(c.PreemptionSeen)
    assert seen.hosts == ("b.0",)
    places = tuple(before.places[rank] for rank in sorted(before.places))
    opened = e.RunOpened(
        at=0.0,
        last_epoch=1,
        notices=(e.Notice("b", -1.0, seen.hosts),),  # the deadline passed while no driver lived
        adopted=e.Adopted(1, places, ((0, 0),)),
    )
    hands = Hands(fixed(2), views("a", "b", "c"), opened)
    hands.lose("b.0")
    assert {b: n for b, n in hands.state.budgets.spent.items() if n} == {Budget.PREEMPTION: 1}


def test_an_earlier_drivers_notice_is_not_about_machines_that_came_since_nor_kept_forever() -> None:
    old = e.Notice("b", 100.0, ("b.gone",))
    hands = Hands(fixed(2), views("a", "b", "c"), e.RunOpened(at=0.0, notices=(old,)))
    assert hands.state.fleet.held == {"a", "b"}
    long_past = e.Notice("b", -1000.0, ("b.0",))
    hands = Hands(fixed(2), views("a", "b", "c"), e.RunOpened(at=0.0, notices=(long_past,)))
    assert hands.last(c.PreemptionSeen).deadline is None
    assert hands.state.fleet.held == {"a", "b"}


def test_an_earlier_drivers_notice_is_not_about_workers_on_machines_that_came_since() -> None:
    before = Hands(fixed(2), views("a", "b", "c"))
    places = tuple(before.places[rank] for rank in sorted(before.places))
    gone = e.Notice("b", 100.0, ("b.gone",))
    adopted = e.Adopted(1, places, ((0, 0),))
    hands = Hands(
        fixed(2), views("a", "b", "c"), e.RunOpened(at=0.0, last_epoch=1, notices=(gone,), adopted=adopted)
    )
    assert hands.state.fleet.noticed == {}
    assert hands.all(c.Reserve) == [], "nobody leaves"


@pytest.mark.parametrize("recalled", [5.0, 40.0, 80_000.0])
def test_what_a_machine_says_of_its_notice_counts_more_than_what_an_earlier_driver_wrote(
    recalled: float,
) -> None:
    old = e.Notice("a", recalled, ("a.0", "a.1"))
    hands = Hands(fixed(2), views("a", "b", hosts=2), e.RunOpened(at=0.0, notices=(old,)))
    hands.notice("a.0", 60.0)
    assert hands.state.fleet.noticed["a"].deadline == hands.now + 60.0
    hands.notice("a.1", 70.0)
    assert hands.state.fleet.noticed["a"].deadline == hands.now + 60.0, "of two machines the earlier one"


def test_a_notice_that_was_told_before_the_run_was_opened_is_not_replaced_by_a_recalled_one() -> None:
    controller = Controller(fixed(1))
    controller.handle(e.CapacityChanged(at=0.0, hosts=tuple(views("a", "b"))))
    controller.handle(e.PreemptionNotice(at=0.0, host="b.0", deadline=60.0))
    controller.handle(e.RunOpened(at=0.0, notices=(e.Notice("b", 5.0, ("b.0",)),)))
    assert beliefs_of(controller).fleet.noticed["b"].deadline == 60.0


def test_a_notice_may_come_before_the_engine_lists_its_machine() -> None:
    hands = Hands(fixed(1, max_failures=1), views("a"))
    hands.notice("b.0", 60.0)
    assert hands.all(c.PreemptionSeen) == []
    hands.hosts |= {host.id: host for host in views("b", "c")}
    hands.capacity()
    assert hands.last(c.PreemptionSeen).slice == "b"
    hands.lose("a.0")
    assert hands.state.fleet.held == {"c"}


def test_a_broken_collective_seen_before_the_preempted_host_is_gone_spends_the_preemption_budget(
    either: Run,
) -> None:
    hands = either()
    hands.notice("b.0", 60.0)
    hands.silent.add(c.StopWorkers)
    hands.fail(0, echo=True)
    hands.pass_time(0.1)
    hands.gone(next(stop for stop in hands.all(c.StopWorkers) if stop.host == "a.0"))
    hands.lose("b.0")
    assert hands.last(c.RecoveryDecided).budget == "max_preemption_failures"


def test_a_process_killed_on_a_host_with_a_notice_spends_the_preemption_budget(either: Run) -> None:
    hands = either()
    hands.notice("b.0", 60.0)
    hands.fail(1, Kind.SIGNAL)
    assert hands.last(c.RecoveryDecided).cause.kind is Kind.PREEMPTED


def test_a_users_exception_under_a_notice_is_still_the_users(either: Run) -> None:
    hands = either(max_failures=1)
    hands.notice("b.0", 60.0)
    hands.fail(1, Kind.EXCEPTION)
    assert hands.last(c.RecoveryDecided).budget == "max_failures"


def test_with_nowhere_to_go_workers_train_on_for_as_long_as_it_lasts() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.forget()
    hands.notice("b.0", 60.0)
    hands.pass_time(59.0)
    assert hands.all(c.StopWorkers) == []
    hands.capacity(*views("c"))
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"a", "c"}


def test_workers_do_not_leave_for_a_place_that_is_not_ready(either: Run) -> None:
    hands = either()
    hands.silent.add(c.PrepareHost)
    hands.notice("b.0", 60.0)
    hands.forget()
    hands.pass_time(55.0)
    assert hands.all(c.StopWorkers) == []
    hands.tell(e.HostPrepared(at=0.0, host="c.0"))
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"a", "c"}


def test_an_elastic_run_leaves_by_shrinking() -> None:
    hands = Hands(elastic(low=1, high=2), views("a", "b"))
    hands.notice("b.0", 60.0)
    hands.pass_time(55.0)
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"a"}


def test_only_the_groups_in_the_slice_that_goes_are_moved() -> None:
    hands = Hands(fixed(3, group_size=1), views("a", "b", "c", "d"))
    hands.notice("b.0", 60.0)
    hands.forget()
    hands.pass_time(55.0)
    assert [(a.rank, a.slice) for a in hands.last(c.StartWorkers).assignments] == [(1, "d")]
    assert {stop.host for stop in hands.all(c.StopWorkers)} == {"b.0"}


def test_groups_without_a_spare_stay_until_their_slice_is_gone_if_too_few_would_be_left() -> None:
    hands = Hands(Settings(workers_min=1, workers_max=2, group_size=1, groups_min=2), views("a", "b"))
    hands.forget()
    hands.notice("b.0", 30.0)
    hands.pass_time(29.0)
    assert hands.all(c.StopWorkers) == []
    hands.lose("b.0")
    hands.pass_time(1.0)
    assert hands.brain.phase is Phase.WAITING
    assert hands.state.budgets.spent[Budget.PREEMPTION] == 1


def test_a_notice_goes_with_its_machine_and_does_not_hang_on_to_the_one_that_takes_its_place() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.notice("b.0", 60.0)
    hands.lose("b.0")
    del hands.hosts["b.0"]
    hands.capacity(msgspec.structs.replace(views("b")[0], id="b.new"))
    assert hands.brain.phase is Phase.RUNNING
    hands.forget()
    hands.capacity(*views("c"))
    hands.pass_time(100.0)
    assert hands.all(c.StopWorkers) == hands.all(c.Reserve) == []


def test_groups_that_leave_do_not_take_the_place_of_a_group_that_waits_for_the_rest_of_its_own() -> None:
    settings = fixed(4, group_size=2, max_failures=1, deadlines=Deadlines(together_s=0.0))
    hands = Hands(settings, views("a", "b", "c", "d"))
    hands.lose("d.0")
    assert hands.state.restarts[0].stage is Phase.WAITING
    hands.forget()
    hands.notice("b.0", 60.0)
    hands.pass_time(55.0)
    assert hands.all(c.Reserve) == hands.all(c.StopWorkers) == []
    hands.capacity(*views("e"))
    assert {hands.places[rank].slice for rank in (2, 3)} == {"c", "e"}


def test_notices_that_are_short_and_follow_each_other_lead_to_one_restart(either: Run) -> None:
    hands = either("c", "d")
    hands.forget()
    hands.notice("a.0", 8.0)
    hands.checkpoint(1, (0, 1))
    hands.pass_time(1.0)
    hands.notice("b.0", 8.0)
    hands.checkpoint(2, (0, 1))
    assert hands.all(c.StopWorkers) == []
    hands.pass_time(6.0)
    assert len(hands.all(c.StartWorkers)) == 1
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"c", "d"}


def test_a_notice_that_comes_after_an_earlier_one_has_run_out_counts() -> None:
    hands = Hands(Settings(workers_min=1, workers_max=1, max_failures=0), views("a"))
    hands.notice("a.0", 5.0)
    hands.pass_time(10.0)  # it was not meant
    hands.forget()
    hands.notice("a.0", 25.0)
    assert hands.last(c.PreemptionSeen).deadline == 35.0
    hands.pass_time(25.0)
    hands.lose("a.0")
    assert hands.last(c.RecoveryDecided).budget == "max_preemption_failures"


def test_an_alarm_that_is_late_is_not_forgotten_for_another_event() -> None:
    hands = Hands(Settings(workers_min=1, workers_max=1), views("a"))
    hands.notice("a.0", 100.0)
    alarm = hands.timers[e.TimerName.MIGRATE, 0]
    hands.now = alarm + 1.0
    hands.capacity()
    assert hands.timers[e.TimerName.MIGRATE, 0] == alarm
