"""Who hangs, by what agents find: the one that the others wait for, and nobody who may be at work."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hands import Hands, views

from everstep.control import commands as c, events as e
from everstep.control.settings import Settings
from everstep.control.table import Phase
from everstep.deadlines import Deadlines
from everstep.failures import Kind
from everstep.health.hangs import OnHang, is_overdue, judge
from everstep.health.vitals import Finding, ProcessState, StackPlace, Stage, Vitals

LIMITS = Deadlines()
STEP = Vitals(0, 0, Stage.TRAINING, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0, 10, 10)
STILL = msgspec.structs.replace(STEP, quiet_s=25.0, still_s=25.0, asleep_s=25.0)


def rank(
    number: int, vitals: Vitals = STILL, place: StackPlace = StackPlace.WORKING, **changes: Any
) -> Finding:
    return Finding(msgspec.structs.replace(vitals, rank=number, **changes), place, f"train.py:{number}")


def waiting(number: int, **changes: Any) -> Finding:
    return rank(number, STILL, StackPlace.COLLECTIVE, **changes)


def blamed(*found: Finding, others: tuple[Finding, ...] | None = None) -> tuple[int, ...] | None:
    verdict = judge(found, LIMITS, others)
    return None if verdict is None else verdict.culprits


# ---------------------------------------------------------------------- who is overdue


@pytest.mark.parametrize(
    ("changes", "overdue"),
    [
        ({}, True),
        ({"still_s": 3.0}, False),  # it is busy: an evaluation, or a step that is compiled again
        ({"quiet_s": 2000.0, "still_s": 3.0}, True),  # for longer than anything explains
        ({"usual_s": 100.0}, False),  # its steps take that long
        ({"lull_s": 60.0}, False),  # it was as still before, and went on
        ({"still_s": 0.0, "held_s": 25.0}, True),
        ({"still_s": 0.0, "device_s": 25.0}, True),  # it spins until its GPU is done
        ({"still_s": 0.0, "device_s": 5.0}, False),  # its GPU gets on
        ({"stage": Stage.FIRST_STEP, "quiet_s": 700.0, "still_s": 0.0, "device_s": 650.0}, True),
        ({"state": ProcessState.TRACED}, False),
        ({"stage": Stage.FIRST_STEP}, False),
        ({"stage": Stage.FIRST_STEP, "quiet_s": 700.0, "still_s": 700.0}, True),
        ({"stage": Stage.FIRST_STEP, "quiet_s": 7000.0, "still_s": 0.0}, False),  # compiling
        ({"stage": Stage.CHECKPOINT}, False),
        ({"stage": Stage.CHECKPOINT, "quiet_s": 400.0, "still_s": 400.0}, True),
        ({"stage": Stage.CHECKPOINT, "quiet_s": 400.0, "still_s": 400.0, "usual_s": 390.0}, False),
        ({"stage": Stage.RESTORE, "quiet_s": 400.0, "still_s": 400.0}, True),
        ({"stage": Stage.PAUSE, "quiet_s": 3000.0, "still_s": 3000.0}, False),
        ({"stage": Stage.PAUSE, "quiet_s": 61.0, "allowed_s": 60.0}, True),
        ({"stage": Stage.RETURNED, "quiet_s": 9999.0, "still_s": 9999.0}, False),
    ],
)
def test_a_rank_is_overdue_when_nothing_that_it_may_be_doing_takes_so_long(
    changes: dict[str, Any], overdue: bool
) -> None:
    assert is_overdue(msgspec.structs.replace(STILL, **changes), LIMITS) is overdue


# ---------------------------------------------------------------------- who is to blame


def test_a_stopped_process_is_to_blame_whatever_the_others_do() -> None:
    assert blamed(waiting(0), rank(1, state=ProcessState.STOPPED), rank(2)) == (1,)


def test_a_c_call_that_keeps_pythons_lock_is_to_blame() -> None:
    assert blamed(waiting(0), rank(1, still_s=0.0, held_s=25.0), waiting(2)) == (1,)


def on_gpu(number: int, **changes: Any) -> Finding:
    """It spins until its GPU has done what it was given, which it doesn't."""
    return rank(number, STILL, still_s=0.0, asleep_s=0.0, device_s=25.0, **changes)


def test_a_gpu_that_never_finishes_is_to_blame_if_all_others_wait() -> None:
    assert blamed(waiting(0), on_gpu(1), waiting(2)) == (1,)
    verdict = judge((waiting(0), on_gpu(1)), LIMITS, None)
    assert verdict is not None
    assert "its GPU has not finished what it was given 25 s ago, at train.py:1" in verdict.why


def test_a_gpu_that_waits_for_a_collective_is_not_to_blame() -> None:
    asleep = rank(1)
    assert blamed(on_gpu(0), asleep, waiting(2)) == (1,)
    assert blamed(on_gpu(0, collectives=11), rank(1, collectives=10), on_gpu(2, collectives=11)) == (1,)
    busy = rank(1, STEP)
    assert blamed(on_gpu(0), busy, waiting(2)) is None
    assert blamed(on_gpu(0, collectives=11), busy, on_gpu(2, collectives=11)) is None


@pytest.mark.parametrize(
    ("peer", "culprits"),
    [
        (rank(1, asleep_s=0.0), None),  # a loop of the user's, which may wait on purpose
        (rank(1, place=StackPlace.WAITING), (1,)),  # a data loader that is stuck
    ],
)
def test_a_gpu_that_may_wait_for_a_rank_that_is_late_itself_is_not_to_blame(
    peer: Finding, culprits: tuple[int, ...] | None
) -> None:
    assert blamed(on_gpu(0), peer, waiting(2)) == culprits


def test_of_ranks_that_are_behind_those_whose_gpu_may_wait_for_the_others_are_not_to_blame() -> None:
    ahead = rank(1, STILL, StackPlace.REPORT, reports=11)
    assert blamed(on_gpu(0), ahead, rank(2)) == (2,)
    assert blamed(on_gpu(0), ahead) == (0,)


def test_a_gpu_that_may_wait_for_another_group_is_not_to_blame() -> None:
    busy = rank(1, still_s=0.0, asleep_s=0.0)
    assert blamed(on_gpu(0), others=(waiting(2), busy)) is None
    assert blamed(on_gpu(0), others=(waiting(2), rank(1, STEP))) == (0,)
    assert blamed(on_gpu(0), others=(waiting(2), on_gpu(1))) == (0,)


def test_a_gpu_is_to_blame_for_what_nothing_explains_whatever_the_others_do() -> None:
    long = {"quiet_s": 5000.0, "device_s": 5000.0}
    assert blamed(on_gpu(0), rank(1, STEP)) is None
    assert blamed(rank(0, still_s=0.0, asleep_s=0.0, **long), rank(1, STEP)) == (0,)
    assert blamed(rank(0, stage=Stage.PAUSE, **long), rank(1, STEP)) == (0,)


def test_a_gpu_whose_rank_is_a_collective_behind_is_to_blame() -> None:
    assert blamed(on_gpu(0, collectives=11), on_gpu(1), on_gpu(2, collectives=11)) == (1,)


def test_of_gpus_that_all_wait_in_one_collective_none_is_to_blame_until_nothing_explains_it() -> None:
    assert blamed(on_gpu(0), on_gpu(1)) is None
    for_long = {"quiet_s": 1000.0, "device_s": 1000.0}
    still = [rank(number, STILL, still_s=0.0, asleep_s=0.0, **for_long) for number in (0, 1)]
    assert blamed(*still) == (0, 1)


def test_who_is_a_collective_behind_is_to_blame() -> None:
    found = (waiting(0, collectives=11), waiting(1, collectives=10), waiting(2, collectives=11))
    assert blamed(*found) == (1,)


def test_who_is_behind_and_at_work_is_not_and_neither_are_those_that_wait_for_it() -> None:
    assert blamed(waiting(0, collectives=11), rank(1, STEP), rank(2, collectives=11)) is None


def test_without_counts_the_one_that_is_not_in_a_collective_is_to_blame() -> None:
    assert blamed(waiting(0), rank(1), waiting(2)) == (1,)


def test_who_waits_for_a_child_or_a_thread_is_to_blame_if_nobody_is_at_work() -> None:
    assert blamed(waiting(0), rank(1, STILL, StackPlace.WAITING), waiting(2)) == (1,)


def test_who_waits_for_something_is_not_to_blame_while_another_rank_is_busy() -> None:
    busy = rank(0, STILL, still_s=0.0)
    assert blamed(busy, rank(1, STILL, StackPlace.WAITING)) is None


def test_who_waits_for_something_while_all_others_get_on_is_to_blame() -> None:
    assert blamed(rank(0, STEP, reports=12), rank(1, STILL, StackPlace.WAITING)) == (1,)


def test_a_rank_that_has_returned_is_to_blame_if_all_others_wait() -> None:
    assert blamed(waiting(0), rank(1, stage=Stage.RETURNED), waiting(2)) == (1,)


def test_a_rank_that_has_returned_is_not_to_blame_for_one_that_hangs_by_itself() -> None:
    assert blamed(rank(0), rank(1, stage=Stage.RETURNED, reports=12)) == (0,)


def test_the_last_rank_may_take_its_time_after_the_others_have_returned() -> None:
    assert blamed(rank(0), rank(1, stage=Stage.RETURNED)) is None
    assert blamed(rank(0, STILL, StackPlace.WAITING), rank(1, stage=Stage.RETURNED)) is None


def test_who_has_not_reported_is_to_blame_if_a_report_waits_for_it() -> None:
    saves = rank(0, STILL, StackPlace.REPORT, reports=16, collectives=10)
    assert blamed(saves, waiting(1, reports=0, collectives=11), waiting(2, reports=0, collectives=11)) == (
        1,
        2,
    )


def test_ranks_that_wait_in_different_collectives_can_not_meet() -> None:
    found = [msgspec.structs.replace(waiting(n), stack=f"line {n // 2}") for n in range(3)]
    assert blamed(*found) == (2,)
    assert blamed(*found, others=()) is None  # they may wait for another replica group


def test_ranks_that_wait_in_the_same_collective_may_have_a_slow_network() -> None:
    assert blamed(waiting(0), waiting(1)) is None
    far = {"quiet_s": 1000.0, "still_s": 1000.0}
    assert blamed(waiting(0, **far), waiting(1, **far)) == (0, 1)


# ---------------------------------------------------------------------- who only does nothing


@pytest.mark.parametrize("place", [StackPlace.WORKING, StackPlace.WAITING, StackPlace.UNKNOWN])
def test_ranks_that_do_nothing_together_hang_only_after_far_longer_than_any_step(place: StackPlace) -> None:
    def idle(seconds: float, usual: float = 1.0) -> tuple[int, ...] | None:
        still = {"quiet_s": seconds, "still_s": seconds, "asleep_s": seconds, "usual_s": usual}
        return blamed(rank(0, STILL, place, **still), rank(1, STILL, place, **still))

    assert idle(25.0) is None
    assert idle(890.0) is None
    assert idle(910.0) == (0, 1)
    assert idle(910.0, usual=100.0) is None
    assert idle(1010.0, usual=100.0) == (0, 1)


def test_a_single_worker_that_does_nothing_may_wait_for_something() -> None:
    assert blamed(rank(0)) is None
    assert blamed(rank(0, held_s=25.0)) is None
    assert blamed(rank(0, state=ProcessState.STOPPED)) == (0,)


def test_a_loop_of_the_users_that_waits_for_something_is_left_alone() -> None:
    assert blamed(rank(0, asleep_s=1.0), waiting(1)) is None
    assert blamed(rank(0, STILL, StackPlace.WAITING, asleep_s=1.0), waiting(1)) == (0,)


def test_a_rank_whose_peers_are_ahead_by_reports_is_to_blame_though_they_do_not_wait() -> None:
    assert blamed(rank(0, STEP, reports=14), rank(1), rank(2, STEP, reports=14)) == (1,)


def test_a_replica_group_of_one_worker_hangs_if_the_other_groups_train_or_wait() -> None:
    assert blamed(rank(1), others=(rank(0, STEP),)) == (1,)
    assert blamed(rank(1), others=(waiting(0),)) == (1,)
    assert blamed(rank(1), others=(rank(0),)) is None
    assert blamed(waiting(1), others=(rank(0, STEP),)) is None  # it waits for a quorum


@pytest.mark.parametrize(
    ("step_s", "says"),
    [
        (0.0, "no progress for 25 s, at"),
        (0.0612, "no progress for 25 s (a step usually takes 0.061 s), at"),
        (12.34, "no progress for 25 s (a step usually takes 12.3 s), at"),
    ],
)
def test_a_hang_says_how_long_a_step_usually_takes_where_that_is_known(step_s: float, says: str) -> None:
    verdict = judge([waiting(0), rank(1, step_s=step_s)], LIMITS)
    assert verdict is not None
    assert verdict.why.startswith(says)


def test_long_steps_are_given_little_more_than_they_usually_take() -> None:
    steps = {"usual_s": 300.0, "still_s": 300.0, "asleep_s": 300.0}
    assert blamed(rank(0, quiet_s=310.0, **steps), waiting(1)) is None
    assert blamed(rank(0, quiet_s=320.0, **steps), waiting(1)) == (0,)


# ---------------------------------------------------------------------- what is done about it


def hands(on_hang: OnHang = OnHang.RESTART, max_failures: int = 1) -> Hands:
    settings = Settings(workers_min=3, workers_max=3, max_failures=max_failures, on_hang=on_hang)
    started = Hands(settings, views("slice-0", "slice-1", "slice-2"))
    for number in range(3):
        started.report(number, 10)
    return started


def quiet(to: Hands, number: int, vitals: Vitals = STILL) -> None:
    own = msgspec.structs.replace(vitals, rank=number)
    host = to.places[number].host
    to.tell(e.WorkersQuiet(at=0.0, host=host, epoch=to.brain.epoch, vitals=(own,)))


def examine(to: Hands, *found: Finding) -> None:
    for one in found:
        command = to.all(c.ExamineWorkers)[-1]
        to.tell(
            e.WorkersExamined(
                at=0.0,
                host=to.places[one.vitals.rank].host,
                epoch=command.epoch,
                check=command.check,
                found=(one,),
            )
        )


HUNG = (waiting(0), rank(1), waiting(2))


def test_a_hang_is_a_failure_of_the_rank_that_hangs_and_spends_a_restart() -> None:
    run = hands()
    quiet(run, 0)
    examine(run, *HUNG)
    assert run.last(c.HangSeen).ranks == (1,)
    assert run.last(c.KeepStacks).culprits == (1,)
    decided = run.last(c.RecoveryDecided)
    assert (decided.cause.kind, decided.cause.rank, decided.budget) == (Kind.HANG, 1, "max_failures")
    assert run.brain.phase is Phase.RUNNING
    assert run.brain.epoch == 2


def test_ranks_that_wait_for_commits_which_storage_does_not_take_do_not_hang() -> None:
    """They have as many uncommitted checkpoints as a rank may have."""
    run = hands()
    run.silent.add(c.CommitCheckpoint)
    run.checkpoint(11)
    waits = msgspec.structs.replace(STILL, stage=Stage.CHECKPOINT, quiet_s=400.0, still_s=400.0)
    for number in range(3):
        quiet(run, number, waits)
    assert not run.all(c.ExamineWorkers)
    run.tell(e.CheckpointCommitted(at=0.0, folder=run.last(c.CommitCheckpoint).checkpoint.folder))
    quiet(run, 0, waits)
    assert run.all(c.ExamineWorkers)


def test_one_look_is_enough_for_all_that_are_quiet() -> None:
    run = hands()
    for number in range(3):
        quiet(run, number)
    assert len({command.check for command in run.all(c.ExamineWorkers)}) == 1


def test_who_has_moved_by_the_time_of_the_look_is_left_alone_and_looked_at_again_later() -> None:
    run = hands()
    quiet(run, 0)
    examine(run, *(rank(number, STEP) for number in range(3)))
    assert not run.all(c.HangSeen)
    quiet(run, 0)
    assert len({command.check for command in run.all(c.ExamineWorkers)}) == 1
    run.pass_time(LIMITS.hang_s)
    quiet(run, 0)
    assert len({command.check for command in run.all(c.ExamineWorkers)}) == 2


def test_another_rank_that_is_overdue_is_looked_at_at_once() -> None:
    run = hands()
    quiet(run, 0)
    examine(run, waiting(0), rank(1, STEP), waiting(2))
    quiet(run, 2)
    assert len({command.check for command in run.all(c.ExamineWorkers)}) == 1
    quiet(run, 1)
    examine(run, *HUNG)
    assert run.last(c.HangSeen).ranks == (1,)


def test_a_host_that_does_not_answer_is_not_waited_for_longer_than_its_deadline() -> None:
    run = hands()
    quiet(run, 1)
    examine(run, *HUNG[:2])
    assert not run.all(c.HangSeen)
    run.pass_time(LIMITS.examine_s)
    assert run.last(c.HangSeen).ranks == (1,)


def test_a_failure_during_the_look_is_the_failure() -> None:
    run = hands()
    quiet(run, 1)
    run.fail(2)
    examine(run, *HUNG)
    assert not run.all(c.HangSeen)


def test_a_warning_is_given_once_and_again_only_after_it_has_moved() -> None:
    run = hands(OnHang.WARN)
    for expected, age in ((1, 10.0), (1, 100.0), (2, 0.0)):
        run.pass_time(LIMITS.hang_s)
        changes = {"quiet_s": STILL.quiet_s + age, "still_s": STILL.still_s + age}
        quiet(run, 1)
        examine(run, waiting(0, **changes), rank(1, **changes), waiting(2, **changes))
        assert len(run.all(c.HangSeen)) == expected
    assert run.brain.epoch == 1


def test_on_hang_fail_ends_the_run() -> None:
    run = hands(OnHang.FAIL, max_failures=-1)
    quiet(run, 1)
    examine(run, *HUNG)
    end = run.last(c.EndRun)
    assert end.cause is not None
    assert end.cause.kind is Kind.HANG


def test_a_function_that_has_never_reported_is_only_warned_about() -> None:
    run = Hands(Settings(workers_min=2, workers_max=2, max_failures=1), views("slice-0", "slice-1"))
    late = {"stage": Stage.FIRST_STEP, "quiet_s": 700.0, "still_s": 700.0, "reports": 0, "collectives": 0}
    quiet(run, 0, msgspec.structs.replace(STILL, **late))
    examine(run, rank(0, **late), rank(1, **late))
    assert run.last(c.HangSeen).action == "warn"
    assert run.brain.epoch == 1
