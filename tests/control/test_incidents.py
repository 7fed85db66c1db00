"""Which failures belong together, what was the cause, which budget it spends, and how long the pause is."""

from __future__ import annotations

import pytest
from hands import Hands, Run, stage, views

from everstep.backoff import Backoff
from everstep.control import commands as c, events as e
from everstep.control.budgets import BUDGET_OF, Budget, Budgets
from everstep.control.commands import Outcome
from everstep.control.controller import Settings
from everstep.control.table import Phase
from everstep.deadlines import Deadlines
from everstep.failures import Failure, Incident, Kind
from everstep.health.hosts import Suspects
from everstep.topology.slices import HostView


def run(workers: int = 2, slices: tuple[str, ...] = ("a", "b", "c"), **more: int) -> Hands:
    settings = Settings(workers_min=workers, workers_max=workers, **{"max_failures": -1, **more})  # type: ignore[arg-type]
    return Hands(settings, views(*slices))


def failure(kind: Kind, at: float, *, echo: bool = False, message: str = "") -> Failure:
    return Failure(kind, at, message or kind.value, echo=echo)


def incident(*failures: Failure) -> Incident:
    made = Incident(failures[0], failures[0].at)
    for more in failures[1:]:
        made.add(more)
    return made


# ---------------------------------------------------------------------- the first cause


def test_the_first_exception_is_the_cause_and_later_ones_do_not_hide_it() -> None:
    first = failure(Kind.EXCEPTION, 1.0)
    assert incident(failure(Kind.EXCEPTION, 2.0), first, failure(Kind.SIGNAL, 3.0)).cause is first


def test_an_echo_is_not_the_cause_even_if_it_was_seen_first() -> None:
    cause = failure(Kind.EXCEPTION, 2.0)
    assert incident(failure(Kind.EXCEPTION, 1.0, echo=True), cause).cause is cause


def test_a_lost_host_explains_the_echoes_of_it_however_late_it_is_noticed() -> None:
    lost = failure(Kind.HOST_SILENT, 50.0)
    assert incident(failure(Kind.EXCEPTION, 1.0, echo=True), lost).cause is lost


def test_a_lost_host_explains_an_exception_at_about_the_same_time() -> None:
    lost = failure(Kind.HOST_LOST, 1.5)
    assert incident(failure(Kind.EXCEPTION, 1.0), lost).cause is lost


def test_a_host_lost_while_its_workers_are_ended_does_not_hide_the_exception_that_they_are_ended_for() -> (
    None
):
    bug = failure(Kind.EXCEPTION, 1.0)
    assert incident(bug, failure(Kind.HOST_SILENT, 11.0)).cause is bug


def test_a_host_that_was_missed_first_explains_what_followed_its_loss_once_that_is_dated() -> None:
    hands = Hands(Settings(workers_min=2, workers_max=2, max_failures=-1), views("a", "b", "c"))
    hands.silent.add(c.StopWorkers)
    hands.pass_time(100.0)  # a driver that didn't run for a while hears all of it at once
    del hands.hosts["b.0"]
    hands.capacity()
    lost = Failure(Kind.HOST_LOST, 20.0, "connection broken", host="b.0")
    broken = Failure(Kind.EXCEPTION, 20.5, "connection closed by peer", rank=0, host="a.0")
    hands.tell(e.HostLost(at=0.0, host="b.0", failure=lost))
    hands.tell(e.WorkerFailed(at=0.0, epoch=1, generation=0, rank=0, failure=broken))
    for stop in hands.all(c.StopWorkers):
        hands.gone(stop)
    assert hands.last(c.RecoveryDecided).cause.kind is Kind.HOST_LOST


def test_what_cannot_be_retried_is_the_cause_whenever_it_shows() -> None:
    load = failure(Kind.LOAD, 9.0)
    assert incident(failure(Kind.HOST_LOST, 1.0), load).cause is load


def test_an_echo_waits_for_its_cause_before_anybody_is_killed(either: Run) -> None:
    hands = either()
    hands.forget()
    hands.fail(0, echo=True)
    assert stage(hands) is Phase.SETTLING
    assert hands.all(c.StopWorkers) == []
    hands.fail(1, message="the bug")
    assert hands.last(c.RecoveryDecided).cause.message == "the bug"


def test_an_echo_whose_cause_never_shows_is_dealt_with_after_a_moment(either: Run) -> None:
    hands = either()
    hands.fail(0, echo=True)
    hands.pass_time(hands.settings.deadlines.settle_s)
    assert hands.last(c.RecoveryDecided).cause.echo
    assert hands.brain.phase is Phase.RUNNING


def test_an_echo_seen_first_and_then_the_host_lost_is_a_lost_host(either: Run) -> None:
    hands = either()
    hands.silent.add(c.StopWorkers)
    hands.fail(0, echo=True)
    hands.pass_time(1.0)
    hands.gone(next(stop for stop in hands.all(c.StopWorkers) if stop.host == "a.0"))
    hands.lose("b.0", kind=Kind.HOST_SILENT, since=1.0)
    assert hands.last(c.RecoveryDecided).cause.kind is Kind.HOST_SILENT


# ---------------------------------------------------------------------- budgets


def test_every_cause_has_its_budget_but_those_that_no_retry_cures() -> None:
    assert set(BUDGET_OF) == set(Kind)
    assert [kind for kind, budget in BUDGET_OF.items() if budget is None] == [
        Kind.LOAD,
        Kind.STORAGE,
        Kind.LIMIT,
        Kind.CONFLICT,
    ]


def test_what_exceeds_a_limit_while_training_ends_the_run_at_once(either: Run) -> None:
    hands = either()
    hands.fail(0, Kind.LIMIT)
    end = hands.last(c.EndRun)
    assert end.outcome is c.Outcome.FAILED
    assert end.cause is not None
    assert end.cause.kind is Kind.LIMIT
    assert not hands.all(c.RecoveryDecided)


@pytest.mark.parametrize("kind", [Kind.EXCEPTION, Kind.EXIT, Kind.SIGNAL, Kind.OOM])
def test_a_dead_worker_spends_max_failures(kind: Kind, either: Run) -> None:
    hands = either()
    hands.fail(0, kind)
    assert hands.last(c.RecoveryDecided).budget == "max_failures"


def test_several_deaths_in_one_incident_spend_one() -> None:
    hands = run(3, slices=("a", "b", "c", "d"))
    hands.silent.add(c.StopWorkers)
    for rank in range(3):
        hands.fail(rank, Kind.SIGNAL)
    for stop in hands.all(c.StopWorkers):
        hands.gone(stop)
    assert hands.state.budgets.spent[Budget.FAILURES] == 1


def test_a_worker_that_dies_before_it_is_ready_spends_the_startup_budget(
    either: Run,
) -> None:
    hands = either()
    hands.silent.add(c.StartWorkers)
    hands.fail(0)
    hands.forget()
    hands.fail(1, Kind.SIGNAL)
    assert hands.last(c.RecoveryDecided).budget == "controller_failure_limit"
    assert hands.state.budgets.spent[Budget.FAILURES] == 1


def test_a_worker_that_was_ready_and_fails_before_the_others_are_spends_max_failures(
    either: Run,
) -> None:
    hands = either()
    hands.silent.add(c.StartWorkers)
    hands.fail(0)
    hands.ready(0)
    hands.fail(0, message="a bug in the first line")
    assert hands.state.budgets.spent[Budget.FAILURES] == 2


def test_workers_that_are_not_ready_in_time_spend_the_startup_budget_and_are_named(
    either: Run,
) -> None:
    hands = either()
    hands.silent.add(c.StartWorkers)
    hands.fail(0)
    hands.ready(0)
    hands.forget()
    hands.pass_time(hands.settings.deadlines.start_s)
    cause = hands.all(c.RecoveryDecided)[0].cause
    assert (cause.kind, cause.rank, cause.host) == (Kind.START, 1, "b.0")
    assert "rank 1 is not ready 120 s" in cause.message


def test_a_refused_reservation_is_retried_with_a_pause_and_spends_the_startup_budget(
    either: Run,
) -> None:
    hands = either()
    hands.silent.add(c.Reserve)
    hands.lose("b.0")
    hands.reserve_fails()
    assert stage(hands) is Phase.BACKOFF
    assert hands.state.budgets.spent[Budget.STARTUP] == 1
    hands.silent.clear()
    hands.pass_time(1.0)
    assert hands.brain.phase is Phase.RUNNING


def test_a_reservation_that_is_not_granted_in_time_is_withdrawn_and_what_comes_late_is_ignored(
    either: Run,
) -> None:
    hands = either()
    hands.silent.add(c.Reserve)
    hands.lose("b.0")
    late = hands.last(c.Reserve)
    hands.forget()
    hands.pass_time(hands.settings.deadlines.reserve_s)
    assert late.slices in [release.slices for release in hands.all(c.Release)]
    hands.forget()
    hands.tell(e.Reserved(at=0.0, reservation=late.reservation))
    assert hands.said == []


def test_a_host_that_is_not_prepared_in_time_spends_the_startup_budget(either: Run) -> None:
    hands = either()
    hands.silent.add(c.PrepareHost)
    hands.lose("b.0")
    hands.pass_time(hands.settings.deadlines.prepare_s)
    assert hands.all(c.RecoveryDecided)[-1].cause.message.startswith("host c.0 not ready after 300 s")
    assert hands.state.budgets.spent[Budget.STARTUP] == 1


def test_a_host_lost_while_it_is_prepared_spends_the_startup_budget() -> None:
    hands = run(slices=("a", "b", "c", "d"))
    hands.silent.add(c.PrepareHost)
    hands.lose("b.0")
    hands.lose("c.0")
    spent = {budget: n for budget, n in hands.state.budgets.spent.items() if n}
    assert spent == {Budget.FAILURES: 1, Budget.STARTUP: 1}
    hands.silent.clear()
    hands.pass_time(1.0)
    assert hands.places[1].host == "d.0"


def test_a_dead_template_is_a_failure_with_a_name(either: Run) -> None:
    hands = either()
    dead = Failure(Kind.TEMPLATE, 0.0, "SIGKILL", host="a.0")
    hands.silent.add(c.StopWorkers)
    hands.tell(e.HostUnprepared(at=0.0, host="a.0", failure=dead))
    hands.fail(0, Kind.SIGNAL)
    for stop in hands.all(c.StopWorkers):
        hands.gone(stop)
    assert hands.last(c.RecoveryDecided).cause == dead
    assert "a.0" in [prepare.host for prepare in hands.all(c.PrepareHost)]


def test_a_process_that_ends_without_a_word_is_a_failure(either: Run) -> None:
    hands = either()
    hands.gone(c.StopWorkers("b.0", 1, frozenset({1}), 0.0, 0))
    assert hands.last(c.RecoveryDecided).cause.kind is Kind.EXIT
    assert hands.brain.phase is Phase.RUNNING


def test_a_worker_that_has_returned_does_not_fail_any_more(either: Run) -> None:
    hands = either()
    hands.returns(1)
    hands.forget()
    hands.fail(1, Kind.SIGNAL)
    hands.lose("b.0")
    assert hands.all(c.RecoveryDecided) == hands.all(c.StopWorkers) == []


def test_max_failures_of_n_allows_n_recoveries() -> None:
    budgets = Budgets(Settings(workers_min=1, workers_max=1, max_failures=2, controller_failure_limit=0))
    assert [budgets.spend(Budget.FAILURES) for _ in range(3)] == [True, True, False]
    assert not budgets.spend(Budget.STARTUP)
    assert all(budgets.spend(Budget.PREEMPTION) for _ in range(100))


def test_a_run_that_may_not_fail_once_ends_at_the_first_failure(either: Run) -> None:
    hands = either(max_failures=0)
    hands.fail(0)
    assert hands.last(c.EndRun).outcome is Outcome.FAILED


# ---------------------------------------------------------------------- backoff, and setting aside


def test_the_first_recovery_is_immediate_and_the_pauses_then_grow_to_a_cap() -> None:
    backoff = Backoff(Deadlines(backoff_first_s=1.0, backoff_factor=2.0, backoff_max_s=5.0))
    assert [backoff.next_pause(0.0) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_healthy_stretch_forgets_earlier_failures() -> None:
    backoff = Backoff(Deadlines(healthy_s=60.0))
    backoff.next_pause(0.0)
    backoff.healthy(1.0)
    assert backoff.next_pause(30.0) > 0
    backoff.healthy(31.0)
    assert backoff.next_pause(91.0) == 0.0


def test_a_run_that_fails_for_days_does_not_overflow() -> None:
    backoff = Backoff(Deadlines())
    assert [backoff.next_pause(0.0) for _ in range(5000)][-1] == 60.0


def test_a_second_failure_in_a_row_pauses_before_it_restarts(either: Run) -> None:
    hands = either()
    hands.fail(0)
    hands.fail(0)
    assert stage(hands) is Phase.BACKOFF
    assert hands.last(c.RecoveryDecided).pause_s == 1.0
    hands.pass_time(1.0)
    assert hands.brain.phase is Phase.RUNNING


def test_a_host_is_set_aside_after_enough_failures_and_comes_back_after_a_while() -> None:
    suspects = Suspects(Deadlines(set_aside_after=2, set_aside_s=100.0))
    assert suspects.blame("a", 0.0) is None
    assert suspects.blame("a", 200.0) is None
    assert suspects.blame("a", 250.0) == 350.0
    assert suspects.set_aside(349.0) == {"a"}
    assert suspects.set_aside(350.0) == frozenset()


def test_hosts_that_are_lost_at_once_are_taken_in_before_anything_is_placed() -> None:
    settings = Settings(workers_min=4, workers_max=4, max_failures=1, controller_failure_limit=0)
    hands = Hands(settings, views("a", "b", "c", hosts=2))
    hands.silent.add(c.StopWorkers)
    hands.fail(0)
    for command in hands.all(c.StopWorkers):
        if command.host != "a.1":
            hands.gone(command)
    # One list tells that two are gone, and that another machine has taken the second one's place.
    for host in ("a.1", "b.1"):
        del hands.hosts[host]
    hands.capacity(HostView("b.1-new", "b", 1, 1, 2))
    assert [decided.budget for decided in hands.all(c.RecoveryDecided)] == ["max_failures"]
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"b", "c"}
    assert "b.1-new" in {a.host for a in hands.last(c.StartWorkers).assignments}
