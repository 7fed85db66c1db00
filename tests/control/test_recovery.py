"""The recovery ladder: for each failure the lowest rung that works."""

from __future__ import annotations

import msgspec
import pytest
from hands import Hands, Run, stage, views

from everstep.control import commands as c, events as e
from everstep.control.budgets import Budget
from everstep.control.commands import Outcome, Rung
from everstep.control.controller import Settings
from everstep.control.table import Phase
from everstep.deadlines import Deadlines
from everstep.failures import Failure, Kind
from everstep.saved.snapshots import At


def fixed(workers: int = 2, **more: object) -> Settings:
    return Settings(workers_min=workers, workers_max=workers, **{"max_failures": -1, **more})  # type: ignore[arg-type]


def elastic(low: int, high: int, **more: object) -> Settings:
    return Settings(workers_min=low, workers_max=high, **{"max_failures": -1, **more})  # type: ignore[arg-type]


def in_groups(groups: int, **more: object) -> Settings:
    """Groups of one; what fails is replaced at once, without looking whether others fail, too."""
    return fixed(groups, group_size=1, **{"deadlines": Deadlines(together_s=0.0), **more})


def test_a_run_reserves_prepares_starts_and_trains() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    assert hands.phases == ["placing", "starting", "running"]
    assert [
        type(command)
        for command in hands.said
        if isinstance(command, c.Reserve | c.PrepareHost | c.StartWorkers)
    ] == [
        c.Reserve,
        c.PrepareHost,
        c.PrepareHost,
        c.StartWorkers,
    ]
    assert hands.last(c.GroupStarted).rung is Rung.FIRST_START


def test_a_run_whose_ranks_have_all_returned_is_finished() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.returns(0)
    assert hands.brain.phase is Phase.RUNNING
    hands.returns(1)
    assert hands.last(c.EndRun).outcome is Outcome.FINISHED
    assert hands.last(c.Release).slices == ("a", "b")
    assert hands.last(c.RequestCapacity).workers == 0


# ---------------------------------------------------------------------- rung 1


def test_only_the_failed_group_is_replaced_and_the_others_never_stop() -> None:
    hands = Hands(in_groups(3), views("a", "b", "c"))
    hands.forget()
    hands.fail(1, Kind.SIGNAL)
    assert {rank for stop in hands.all(c.StopWorkers) for rank in stop.ranks} == {1}
    start = hands.last(c.StartWorkers)
    assert [a.rank for a in start.assignments] == [1]
    assert start.generations == ((1, 1),)
    assert hands.brain.epoch == 1
    assert hands.phases == []
    assert hands.last(c.GroupStarted).rung is Rung.REPLACE_GROUPS


def test_two_groups_that_fail_together_are_replaced_together() -> None:
    hands = Hands(in_groups(4, deadlines=Deadlines(together_s=0.2)), views("a", "b", "c", "d"))
    hands.forget()
    hands.fail(1)
    hands.pass_time(0.1)
    hands.fail(2)
    assert hands.all(c.StartWorkers) == []
    hands.pass_time(0.1)
    assert len(hands.all(c.RecoveryDecided)) == 1
    assert [a.rank for a in hands.last(c.StartWorkers).assignments] == [1, 2]


def test_a_group_that_fails_while_another_is_being_stopped_is_replaced_with_it() -> None:
    hands = Hands(in_groups(4), views("a", "b", "c", "d"))
    hands.silent.add(c.StopWorkers)
    hands.fail(1)
    hands.fail(2)
    hands.forget()
    hands.silent.clear()
    for host, rank in (("b.0", 1), ("c.0", 2)):
        hands.gone(c.StopWorkers(host, 1, frozenset({rank}), 0.0, 0))
    assert len(hands.all(c.RecoveryDecided)) == 1
    assert [a.rank for a in hands.last(c.StartWorkers).assignments] == [1, 2]


def test_all_groups_of_a_lost_slice_are_replaced_together_on_one_spare() -> None:
    hands = Hands(in_groups(4), views("a", "b", "c", hosts=2))
    hands.forget()
    hands.lose("a.0")
    start = hands.last(c.StartWorkers)
    assert [(a.rank, a.host) for a in start.assignments] == [(0, "c.0"), (1, "c.1")]
    assert hands.state.budgets.spent[Budget.FAILURES] == 1


def test_a_replacement_keeps_ranks_groups_and_slice_ids() -> None:
    hands = Hands(in_groups(2), views("a", "b", "c"))
    before = hands.places[1]
    hands.lose("b.0")
    assert hands.places[1] == msgspec.structs.replace(before, host="c.0", slice="c")


def test_a_replacement_that_fails_three_times_becomes_a_full_restart() -> None:
    hands = Hands(in_groups(3), views("a", "b", "c"))
    hands.silent.add(c.StartWorkers)
    hands.fail(1)
    for _ in range(3):
        hands.fail(1, Kind.SIGNAL)
        hands.pass_time(5.0)
    assert hands.brain.epoch == 2
    assert len(hands.last(c.StartWorkers).assignments) == 3


def test_when_all_groups_fail_everything_restarts() -> None:
    hands = Hands(in_groups(2), views("a", "b"))
    hands.silent.add(c.StopWorkers)
    hands.fail(0)
    hands.fail(1)
    hands.silent.clear()
    for host, rank in (("a.0", 0), ("b.0", 1)):
        hands.gone(c.StopWorkers(host, 1, frozenset({rank}), 0.0, 0))
    assert hands.brain.epoch == 2
    assert hands.state.budgets.spent[Budget.FAILURES] == 1


def test_a_group_without_a_spare_waits_while_the_others_train() -> None:
    hands = Hands(in_groups(2), views("a", "b"))
    hands.lose("b.0")
    assert hands.brain.phase is Phase.RUNNING
    assert "need room for replica group 1; 0 whole slices are free" in hands.last(c.Waiting).message
    hands.capacity(*views("c"))
    assert hands.places[1].host == "c.0"


def test_a_slice_that_is_whole_again_with_another_machine_is_used_again() -> None:
    hands = Hands(in_groups(2), views("a", "b", hosts=1))
    hands.lose("b.0")
    del hands.hosts["b.0"]
    hands.capacity(msgspec.structs.replace(views("b")[0], id="b.new"))
    assert hands.places[1].host == "b.new"


def test_the_word_of_an_earlier_generation_is_refused() -> None:
    hands = Hands(in_groups(2), views("a", "b"))
    hands.fail(1)
    hands.forget()
    hands.gone(c.StopWorkers("b.0", 1, frozenset({1}), 0.0, 0))
    hands.tell(e.WorkerReturned(at=0.0, epoch=1, generation=0, rank=1))
    assert hands.said == []
    assert 1 not in hands.brain.groups[1].gone


def test_a_group_that_fails_after_the_others_finished_ends_the_run_as_finished() -> None:
    hands = Hands(in_groups(2), views("a", "b"))
    hands.returns(0)
    hands.fail(1)
    assert hands.last(c.EndRun).outcome is Outcome.FINISHED


def test_a_group_that_fails_after_the_others_finished_still_spends_the_budget() -> None:
    hands = Hands(in_groups(2, max_failures=0), views("a", "b"))
    hands.returns(0)
    hands.fail(1)
    assert hands.last(c.EndRun).outcome is Outcome.FAILED


# ---------------------------------------------------------------------- rung 2


def test_dead_processes_restart_in_place(either: Run) -> None:
    hands = either()
    hands.forget()
    hands.fail(0)
    assert hands.all(c.Reserve) == hands.all(c.PrepareHost) == hands.all(c.Release) == []
    assert {(a.rank, a.host) for a in hands.last(c.StartWorkers).assignments} == {(0, "a.0"), (1, "b.0")}
    if len(hands.places) == 2:
        assert hands.phases == ["stopping", "placing", "starting", "running"]
        assert hands.last(c.GroupStarted).rung is Rung.RESTART_IN_PLACE


def test_survivors_are_ended_at_once(either: Run) -> None:
    hands = either()
    hands.silent.add(c.StopWorkers)
    hands.fail(0)
    assert {(stop.host, stop.grace_s) for stop in hands.all(c.StopWorkers)} == {("a.0", 0.0), ("b.0", 0.0)}


def test_a_host_that_does_not_confirm_the_end_of_its_workers_counts_as_lost(either: Run) -> None:
    hands = either()
    hands.silent.add(c.StopWorkers)
    hands.fail(0, message="my bug")
    hands.gone(hands.all(c.StopWorkers)[0])
    hands.pass_time(hands.settings.deadlines.kill_s)
    assert [retire.host for retire in hands.all(c.RetireHost)] == ["b.0"]
    decided = hands.last(c.RecoveryDecided)
    assert decided.cause.message == "my bug"
    assert set(hands.brain.groups[0].hosts()) == {"a.0", "c.0"}


def test_the_workers_restore_the_newest_committed_checkpoint(either: Run) -> None:
    hands = either()
    hands.checkpoint(1, (0, 1))
    hands.checkpoint(2, (0, 1))
    hands.report(0, 3, part=True)
    hands.fail(1)
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k2"
    assert hands.last(c.DiscardCheckpoint).folder == "e1-g0-k3"


def test_a_start_waits_for_the_answer_to_a_commit(either: Run) -> None:
    hands = either()
    hands.silent.add(c.CommitCheckpoint)
    hands.checkpoint(1, (0, 1))
    hands.fail(0)
    assert stage(hands) is Phase.PLACING
    hands.tell(e.CheckpointCommitted(at=0.0, folder="e1-g0-k1"))
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k1"


def test_a_restart_waits_a_while_for_uploads_that_need_no_process() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.pass_time(5.0)
    hands.report(0, 1, part=True)
    hands.report(1, 1, owed=(1,))
    hands.fail(0)
    assert hands.brain.phase is Phase.PLACING
    hands.pass_time(4.0)
    assert hands.brain.phase is Phase.PLACING
    hands.report(1, 1, part=True)
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k1"


def test_a_restart_does_not_wait_for_an_upload_forever(either: Run) -> None:
    hands = either()
    hands.pass_time(3600.0)
    hands.report(0, 1, part=True)
    hands.report(1, 1, owed=(1,))
    hands.fail(0)
    hands.pass_time(hands.settings.deadlines.upload_wait_s)
    assert hands.brain.phase is Phase.RUNNING
    assert hands.last(c.StartWorkers).checkpoint is None


def test_a_restart_waits_no_longer_for_an_upload_than_its_steps_take_to_be_trained_again() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.pass_time(100.0)
    hands.checkpoint(1, (0, 1))
    hands.pass_time(2.0)
    for rank in (0, 1):
        hands.report(rank, 2, owed=(2,))
    hands.fail(0)
    hands.pass_time(1.9)
    assert hands.brain.phase is Phase.PLACING
    hands.pass_time(0.2)
    assert hands.last(c.StartWorkers).checkpoint == "e1-g0-k1"


def test_a_restart_does_not_wait_for_an_upload_of_what_every_rank_has_in_memory() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.pass_time(100.0)
    for rank in (0, 1):
        hands.report(rank, 1, owed=(1,), taken=True)
    hands.fail(0)
    start = hands.last(c.StartWorkers)
    assert (start.epoch, start.snapshot, start.checkpoint) == (2, At(1, 1), None)


# ---------------------------------------------------------------------- rungs 3, 4 and 5


def test_a_lost_host_is_replaced_from_free_capacity(either: Run) -> None:
    hands = either()
    hands.forget()
    hands.lose("b.0")
    assert hands.last(c.Reserve).slices == ("c",)
    assert [prepare.host for prepare in hands.all(c.PrepareHost)] == ["c.0"]
    assert {(a.rank, a.host) for a in hands.last(c.StartWorkers).assignments} == {(0, "a.0"), (1, "c.0")}
    if len(hands.places) == 2:
        assert hands.last(c.GroupStarted).rung is Rung.REPLACE_HOSTS
    assert ("b",) in [release.slices for release in hands.all(c.Release)]


def test_one_host_lost_takes_its_whole_slice_along() -> None:
    hands = Hands(fixed(4), views("a", "b", "c", hosts=2))
    hands.lose("a.1")
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"b", "c"}


def test_a_loss_that_the_list_of_hosts_tells_first_is_a_loss(either: Run) -> None:
    hands = either()
    del hands.hosts["b.0"]
    hands.capacity()
    assert hands.places[1].host == "c.0"
    hands.forget()
    hands.tell(e.HostLost(at=0.0, host="b.0", failure=Failure(Kind.HOST_LOST, 0.0, "gone", host="b.0")))
    assert hands.said == []


def test_an_elastic_run_shrinks_to_the_whole_slices_that_remain() -> None:
    hands = Hands(elastic(2, 4), views("a", "b", hosts=2))
    hands.lose("b.0")
    start = hands.last(c.StartWorkers)
    assert {a.slice for a in start.assignments} == {"a"}
    assert {(a.world_size, a.num_slices) for a in start.assignments} == {(2, 1)}
    assert hands.last(c.GroupStarted).rung is Rung.SHRINK


def test_below_the_minimum_a_run_waits_says_why_and_gives_everything_back() -> None:
    hands = Hands(fixed(4), views("a", "b", hosts=2))
    hands.forget()
    hands.lose("b.1")
    assert hands.brain.phase is Phase.WAITING
    assert (
        "need room for at least 4 workers; 1 whole slice is free, with room for 2"
        in hands.last(c.Waiting).message
    )
    assert "b: not whole (1 of 2 hosts there; lost: b.1)" in hands.last(c.Waiting).message
    assert sorted(name for release in hands.all(c.Release) for name in release.slices) == ["a", "b"]
    hands.pass_time(hands.settings.deadlines.capacity_log_s)
    assert len(hands.all(c.Waiting)) == 2
    hands.capacity(*views("c", hosts=2))
    assert hands.brain.phase is Phase.RUNNING


def test_four_slices_with_one_dead_host_each_are_no_slice() -> None:
    broken = [h for h in views("a", "b", "c", "d", hosts=2) if h.index == 0]
    hands = Hands(elastic(1, 8), broken)
    assert hands.brain.phase is Phase.WAITING


def test_what_others_hold_does_not_count() -> None:
    hands = Hands(fixed(2), [msgspec.structs.replace(h, free=False) for h in views("a", "b")])
    assert hands.brain.phase is Phase.WAITING
    assert "in use by others" in hands.last(c.Waiting).message


def test_a_host_that_keeps_failing_is_set_aside_if_there_is_another() -> None:
    hands = Hands(fixed(1), views("a", "b"))
    for _ in range(3):
        assert hands.places[0].host == "a.0"
        hands.fail(0, Kind.SIGNAL)
        hands.pass_time(10.0)
    assert hands.last(c.HostSetAside).host == "a.0"
    assert hands.places[0].host == "b.0"


def test_a_host_that_keeps_failing_is_used_on_if_there_is_no_other() -> None:
    hands = Hands(fixed(1), views("a"))
    for _ in range(5):
        hands.fail(0, Kind.SIGNAL)
        hands.pass_time(20.0)
    assert hands.brain.phase is Phase.RUNNING


def test_many_ranks_that_die_at_once_blame_their_host_once() -> None:
    hands = Hands(fixed(3), views("a", slots=3))
    hands.silent.add(c.StopWorkers)
    for rank in range(3):
        hands.fail(rank, Kind.SIGNAL)
    hands.gone(hands.last(c.StopWorkers))
    assert hands.all(c.HostSetAside) == []


# ---------------------------------------------------------------------- rung 6


def test_a_spent_budget_ends_the_run_with_the_first_cause(either: Run) -> None:
    hands = either(max_failures=1)
    hands.fail(0, message="first")
    hands.pass_time(10.0)
    hands.fail(1, message="second")
    end = hands.last(c.EndRun)
    assert end.outcome is Outcome.FAILED
    assert end.cause is not None
    assert end.cause.message == "second"
    assert end.message == "max_failures=1 is used up"
    assert {f"{name}.0" for name in hands.last(c.Release).slices} == {a.host for a in hands.places.values()}


def test_a_function_that_cannot_be_loaded_ends_the_run_at_once() -> None:
    hands = Hands(fixed(2), [])
    hands.silent.add(c.PrepareHost)
    hands.capacity(*views("a", "b"))
    failure = Failure(Kind.LOAD, 0.0, "No module named 'x'", host="a.0")
    hands.tell(e.HostUnprepared(at=0.0, host="a.0", failure=failure))
    assert hands.last(c.EndRun).outcome is Outcome.FAILED
    assert hands.last(c.EndRun).message == "this can't be retried"


def test_a_function_that_has_trained_and_fails_to_load_elsewhere_is_that_hosts_failure(either: Run) -> None:
    hands = either()
    hands.silent.add(c.PrepareHost)
    hands.lose("a.0")
    failure = Failure(Kind.LOAD, 0.0, "No module named 'x'", host="c.0")
    hands.tell(e.HostUnprepared(at=0.0, host="c.0", failure=failure))
    assert stage(hands) is Phase.BACKOFF
    assert hands.state.budgets.spent[Budget.STARTUP] == 1


# ---------------------------------------------------------------------- what a recovery cost


def test_every_recovery_ends_with_one_line_whose_seconds_add_up(either: Run) -> None:
    hands = either()
    hands.now = 100.0
    hands.checkpoint(1, (0, 1))
    hands.report(0, 2)
    hands.report(1, 2)
    hands.silent |= {c.StopWorkers, c.StartWorkers}
    failure = Failure(Kind.SIGNAL, 99.0, "SIGKILL", rank=0, host="a.0")
    hands.tell(e.WorkerFailed(at=0.0, epoch=1, generation=0, rank=0, failure=failure))
    hands.now = 102.0
    for stop in hands.all(c.StopWorkers):
        hands.gone(stop)
    hands.now = 103.0
    for rank in (0, 1):
        hands.tell(e.WorkerSpawned(at=0.0, pid=1, **hands.about(rank)))
    hands.now = 104.5
    for rank in (0, 1):
        hands.tell(e.WorkerReady(at=0.0, **hands.about(rank)))
    hands.now = 107.0
    for rank in (0, 1):
        hands.tell(e.Reported(at=0.0, upto=1, restore_s=2.0, **hands.about(rank)))
    line = hands.last(c.Recovered)
    assert len(hands.all(c.Recovered)) == 1
    assert (line.detect_s, line.stop_s, line.start_s, line.rendezvous_s) == (1.0, 2.0, 1.0, 1.5)
    assert (line.restore_s, line.first_step_s) == (2.0, 0.5)
    assert line.steps_lost == (1 if len(hands.places) == 2 else 0), "none, where others have trained on"
    assert line.total_s == pytest.approx(107.0 - 99.0)
    assert line.cause == failure


def test_the_seconds_add_up_also_over_starts_that_fail() -> None:
    hands = Hands(fixed(1), views("a"))
    hands.silent.add(c.StartWorkers)
    hands.fail(0)
    for _ in range(3):
        hands.now += 1.0
        hands.fail(0, Kind.SIGNAL)
        hands.pass_time(10.0)
    hands.ready(0)
    hands.now += 1.0
    hands.report(0, 1)
    line = hands.last(c.Recovered)
    assert line.total_s == pytest.approx(hands.now)
    assert line.wait_s == pytest.approx(1.0 + 2.0 + 4.0)
    assert line.cause is not None
    assert line.cause.kind is Kind.EXCEPTION


def test_a_template_that_dies_while_a_commit_is_waited_for_has_a_new_deadline() -> None:
    patient = Deadlines(upload_wait_s=10_000.0)
    settings = Settings(workers_min=1, workers_max=1, max_failures=1, deadlines=patient)
    hands = Hands(settings, views("a", "b"))
    hands.silent.add(c.CommitCheckpoint)
    hands.report(0, 1, part=True)
    hands.fail(0)
    limit = hands.settings.deadlines.prepare_s
    hands.pass_time(2 * limit)  # the host is ready; storage is slow
    hands.silent.add(c.PrepareHost)
    failure = Failure(Kind.TEMPLATE, hands.now, "SIGKILL", host="a.0")
    hands.tell(e.HostUnprepared(at=0.0, host="a.0", failure=failure))
    hands.forget()
    hands.pass_time(limit)
    assert hands.last(c.RecoveryDecided).cause.message.startswith("host a.0 not ready")


# ---------------------------------------------------------------------- a first start that never works


def starting() -> Hands:
    """A run whose first start is under way."""
    hands = Hands(fixed(2), ())
    hands.silent.add(c.StartWorkers)
    hands.capacity(*views("a", "b"))
    return hands


def fail_to_start(hands: Hands, message: str) -> None:
    hands.fail(0, message=message)
    hands.pass_time(60.0)


def test_a_first_start_that_fails_the_same_way_again_and_again_ends_whatever_the_budgets_say() -> None:
    hands = starting()
    for port in (50001, 50002, 50003, 50004):
        fail_to_start(hands, f"ConnectionRefusedError: port {port}")
        assert hands.brain.phase is Phase.STARTING
    fail_to_start(hands, "ConnectionRefusedError: port 50005")
    end = hands.last(c.EndRun)
    assert end.outcome is Outcome.FAILED
    assert end.cause is not None
    assert "port 50005" in end.cause.message
    assert "5 times in the same way" in end.message


def test_first_starts_that_fail_in_different_ways_are_tried_again() -> None:
    hands = starting()
    for n in range(20):
        fail_to_start(hands, "ConnectionRefusedError" if n % 2 else "TimeoutError")
        assert hands.brain.phase is Phase.STARTING


def test_once_a_run_has_trained_its_starts_may_fail_in_the_same_way_as_the_budget_allows() -> None:
    hands = Hands(fixed(2), views("a", "b"))
    hands.silent.add(c.StartWorkers)
    hands.fail(0)
    for _ in range(20):
        fail_to_start(hands, "ConnectionRefusedError")
        assert hands.brain.phase is Phase.STARTING
