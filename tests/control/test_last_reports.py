"""Healthy ranks may finish the report that a failed one had made, before they are ended."""

from __future__ import annotations

from hands import Hands, views

from everstep.control import commands as c
from everstep.control.controller import Settings
from everstep.control.table import Phase
from everstep.deadlines import Deadlines
from everstep.failures import Kind

LIMIT_S = Deadlines().finish_report_s


def running(ranks: int = 2, max_failures: int = 3, **more: int) -> Hands:
    names = "abcd"[:ranks]
    settings = Settings(workers_min=ranks, workers_max=ranks, max_failures=max_failures, **more)
    hands = Hands(settings, views(*names, "spare"))
    hands.forget()
    return hands


def test_the_save_of_the_report_that_a_rank_raised_after_is_committed_and_restored() -> None:
    hands = running()
    hands.report(1, 1)
    hands.fail(1)
    assert not hands.all(c.StopWorkers)
    hands.report(0, 1, part=True)
    assert hands.all(c.StopWorkers)
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k1"


def test_it_is_committed_also_if_the_run_ends_for_the_failure() -> None:
    hands = running(max_failures=0)
    hands.report(1, 1)
    hands.fail(1)
    hands.report(0, 1, part=True)
    kinds = [type(command) for command in hands.said]
    assert kinds.index(c.CommitCheckpoint) < kinds.index(c.EndRun)


def test_every_healthy_rank_is_waited_for_and_no_longer() -> None:
    hands = running(3)
    hands.report(1, 2)
    hands.fail(1)
    hands.report(0, 2, part=True)
    hands.report(2, 1)
    assert not hands.all(c.StopWorkers)
    hands.report(2, 2)
    assert hands.all(c.StopWorkers)


def test_a_rank_that_does_not_come_to_it_is_ended_when_time_is_up() -> None:
    hands = running()
    hands.report(1, 1)
    hands.fail(1)
    hands.pass_time(LIMIT_S - 0.01)
    assert hands.brain.phase is Phase.SETTLING
    hands.pass_time(0.02)
    assert hands.all(c.StopWorkers)


def test_a_rank_that_fails_as_well_or_returns_is_not_waited_for() -> None:
    hands = running(3)
    hands.report(1, 1)
    hands.fail(1)
    hands.fail(0, echo=True)
    assert not hands.all(c.StopWorkers)
    hands.returns(2)
    assert hands.all(c.StopWorkers)


def test_nothing_is_waited_for_if_every_rank_has_made_the_report() -> None:
    hands = running()
    hands.report(0, 2)
    hands.report(1, 1)
    hands.fail(1)
    assert hands.all(c.StopWorkers)


def test_a_rank_that_is_far_behind_is_not_waited_for() -> None:
    hands = running()
    hands.report(0, 100)
    hands.fail(0)
    assert hands.all(c.StopWorkers), "where only rank 0 reports, a recovery takes no longer"


def test_the_report_of_a_host_that_was_lost_is_finished_too() -> None:
    hands = running()
    hands.report(1, 1)
    hands.lose("b.0", kind=Kind.HOST_SILENT)
    assert not hands.all(c.StopWorkers)
    hands.report(0, 1, part=True)
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k1"


def test_a_replica_group_that_is_replaced_waits_for_no_report() -> None:
    hands = running(4, group_size=2)
    hands.report(1, 1)
    hands.fail(1)
    assert {rank for stop in hands.all(c.StopWorkers) for rank in stop.ranks} == {0, 1}


def test_a_rank_that_raises_before_the_others_are_ready_waits_for_their_report_too() -> None:
    hands = running()
    hands.silent.add(c.StartWorkers)
    hands.fail(0)
    hands.silent.clear()
    hands.ready(1)
    hands.report(1, 1)
    hands.forget()
    hands.fail(1)
    assert not hands.all(c.StopWorkers)
    hands.ready(0)
    hands.report(0, 1, part=True)
    assert hands.last(c.StartWorkers).checkpoint == "e2-g0-k1"
