"""Opening again, stopping, and being fenced."""

from __future__ import annotations

import pytest
from hands import Hands, Run, stage, views

from everstep.control import commands as c, events as e
from everstep.control.budgets import Budget
from everstep.control.commands import AskReason, Outcome
from everstep.control.controller import Controller, Settings
from everstep.control.events import StopKind, StopRequested, TimerName
from everstep.control.moving import NEW_CODE
from everstep.control.table import Phase
from everstep.failures import Failure, Kind
from everstep.saved.checkpoints import CheckpointRef
from everstep.saved.reports import Part

SETTINGS = Settings(workers_min=2, workers_max=2, max_failures=3)


def running() -> Hands:
    hands = Hands(SETTINGS, views("a", "b", "c"))
    hands.forget()
    return hands


def stop(now: bool = False) -> StopRequested:
    return StopRequested(at=0.0, kind=StopKind.INTERRUPT, now=now)


# ---------------------------------------------------------------------- stopping


def test_stopped_once_workers_get_to_stop_and_everything_is_given_back(either: Run) -> None:
    hands = either()
    hands.tell(stop())
    ours = {place.host for place in hands.places.values()}
    assert {(s.host, s.grace_s) for s in hands.all(c.StopWorkers)} == {(host, 5.0) for host in ours}
    assert hands.all(c.AskCheckpoint)[0].reason is AskReason.STOP
    assert {f"{name}.0" for name in hands.last(c.Release).slices} == ours
    end = hands.last(c.EndRun)
    assert (end.outcome, end.stop) == (Outcome.STOPPED, StopKind.INTERRUPT)
    assert hands.said[-1] is end


def test_stopped_twice_workers_are_killed_at_once_and_no_commit_is_waited_for(either: Run) -> None:
    hands = either()
    hands.silent |= {c.StopWorkers, c.CommitCheckpoint}
    hands.checkpoint(1, (0, 1))
    hands.tell(stop())
    hands.forget()
    hands.tell(stop(now=True))
    assert {s.grace_s for s in hands.all(c.StopWorkers)} == {0.0}
    for command in hands.all(c.StopWorkers):
        hands.gone(command)
    assert hands.last(c.EndRun).outcome is Outcome.STOPPED
    assert hands.all(c.DiscardCheckpoint) == []


def at_checkpoint() -> e.StopAtCheckpointRequested:
    return e.StopAtCheckpointRequested(at=0.0)


def test_stopped_from_outside_workers_are_asked_for_a_checkpoint_which_ends_the_run(either: Run) -> None:
    hands = either()
    hands.tell(at_checkpoint())
    assert hands.last(c.AskCheckpoint).reason is AskReason.STOP
    assert hands.all(c.StopWorkers) == []
    hands.checkpoint(1)
    end = hands.last(c.EndRun)
    assert (end.outcome, end.stop) == (Outcome.STOPPED, StopKind.USER)
    assert e.TimerName.LAST_CHECKPOINT not in {name for name, _ in hands.timers}


def test_a_last_checkpoint_is_not_waited_for_for_ever_however_often_it_is_asked_for(either: Run) -> None:
    hands = either()
    hands.tell(at_checkpoint())
    hands.pass_time(9.0)
    hands.tell(at_checkpoint())
    assert hands.brain.phase is Phase.RUNNING
    hands.pass_time(1.0)
    assert hands.last(c.EndRun).outcome is Outcome.STOPPED


def test_workers_that_start_while_the_last_checkpoint_is_waited_for_are_asked_too() -> None:
    hands = running()
    hands.tell(at_checkpoint())
    hands.fail(0)
    hands.pass_time(5.0)
    assert hands.brain.phase is Phase.RUNNING
    assert [ask.reason for ask in hands.all(c.AskCheckpoint)] == [
        AskReason.STOP,
        AskReason.NONE,
        AskReason.STOP,
    ]
    hands.checkpoint(1)
    assert hands.last(c.EndRun).outcome is Outcome.STOPPED


def test_while_the_last_checkpoint_is_waited_for_nobody_moves() -> None:
    hands = Hands(Settings(workers_min=1, workers_max=2, resize_interval_s=0.0), views("a"))
    hands.forget()
    hands.tell(at_checkpoint())
    hands.capacity(*views("b"))
    assert hands.all(c.Reserve) == []
    assert [ask.reason for ask in hands.all(c.AskCheckpoint)] == [AskReason.STOP]


def test_a_stop_waits_for_commits_and_uploads_that_are_under_way(either: Run) -> None:
    hands = either()
    hands.silent.add(c.CommitCheckpoint)
    hands.report(0, 1, part=True)
    hands.report(1, 1, owed=(1,))
    hands.tell(stop())
    assert hands.brain.phase is Phase.ENDING
    hands.report(1, 1, part=True)
    assert hands.brain.phase is Phase.ENDING
    hands.tell(e.CheckpointCommitted(at=0.0, folder="e1-g0-k1"))
    assert hands.brain.phase is Phase.ENDED


def test_an_end_does_not_wait_for_an_upload_forever(either: Run) -> None:
    hands = either()
    hands.report(0, 1, part=True)
    hands.report(1, 1, owed=(1,))
    hands.returns(*hands.places)
    assert hands.brain.phase is Phase.ENDING
    hands.pass_time(SETTINGS.deadlines.final_upload_s + SETTINGS.deadlines.stop_grace_s)
    assert hands.brain.phase is Phase.ENDED
    assert hands.last(c.DiscardCheckpoint).folder == "e1-g0-k1"


def test_a_host_that_never_confirms_does_not_hold_up_the_end(either: Run) -> None:
    hands = either()
    hands.silent.add(c.StopWorkers)
    hands.tell(stop())
    hands.pass_time(SETTINGS.deadlines.stop_grace_s + SETTINGS.deadlines.kill_s)
    assert {retire.host for retire in hands.all(c.RetireHost)} == {a.host for a in hands.places.values()}
    assert hands.brain.phase is Phase.ENDED


def test_hosts_that_vanish_from_the_list_do_not_hold_up_the_end(either: Run) -> None:
    hands = either()
    hands.silent.add(c.StopWorkers)
    hands.tell(stop())
    hands.hosts.clear()
    hands.capacity()
    assert hands.brain.phase is Phase.ENDED


def test_a_stop_withdraws_a_reservation_that_has_not_been_answered() -> None:
    hands = Hands(SETTINGS, [])
    hands.silent.add(c.Reserve)
    hands.capacity(*views("a", "b"))
    hands.tell(stop())
    assert hands.last(c.Release).slices == ("a", "b")
    assert hands.brain.phase is Phase.ENDED


@pytest.mark.parametrize("phase", [Phase.NEW, Phase.WAITING, Phase.BACKOFF, Phase.STARTING, Phase.SETTLING])
def test_a_run_can_be_stopped_in_every_phase(phase: Phase, either: Run) -> None:
    if phase is Phase.NEW:
        assert [type(x) for x in Controller(SETTINGS).handle(stop())][-1] is c.EndRun
        return
    hands = either()
    if phase is Phase.WAITING:
        hands.lose("b.0")
        hands.lose("c.0")
        hands.pass_time(1.0)
    elif phase is Phase.BACKOFF:
        hands.fail(0)
        hands.fail(0)
    elif phase is Phase.STARTING:
        hands.silent.add(c.StartWorkers)
        hands.fail(0)
    else:
        hands.fail(0, echo=True)
    assert stage(hands) is phase
    hands.tell(stop())
    assert hands.last(c.EndRun).outcome is Outcome.STOPPED


def test_a_failure_while_a_run_ends_is_recorded_and_changes_nothing(either: Run) -> None:
    hands = either()
    hands.silent.add(c.StopWorkers)
    hands.tell(stop())
    hands.fail(0, Kind.SIGNAL)
    assert hands.all(c.FailureSeen) != []
    assert hands.all(c.RecoveryDecided) == []


# ---------------------------------------------------------------------- one owner


def test_a_fenced_driver_says_so_and_nothing_else_ever_again(either: Run) -> None:
    hands = either()
    hands.forget()
    hands.tell(e.LeaseLost(at=0.0, holder="pid 7 on elsewhere"))
    assert [type(command) for command in hands.said] == [c.EndRun]
    assert hands.last(c.EndRun).outcome is Outcome.FENCED
    hands.forget()
    hands.fail(0)
    hands.lose("a.0")
    hands.tell(stop())
    assert hands.said == []


# ---------------------------------------------------------------------- a later driver


def test_a_run_opened_again_goes_on_from_its_newest_checkpoint_with_a_new_epoch() -> None:
    refs = (CheckpointRef("new", 4, 2), CheckpointRef("old", 3, 9))
    hands = Hands(SETTINGS, views("a", "b"), e.RunOpened(at=0.0, last_epoch=5, checkpoints=refs))
    start = hands.last(c.StartWorkers)
    assert (start.epoch, start.checkpoint) == (6, "new")
    assert hands.all(c.PhaseChanged)[-2].epoch == 6


def test_budgets_that_were_spent_stay_spent() -> None:
    opened = e.RunOpened(at=0.0, spent=((Budget.FAILURES, 3),))
    hands = Hands(SETTINGS, views("a", "b"), opened)
    hands.fail(0)
    assert hands.last(c.EndRun).outcome is Outcome.FAILED


def adopted(refs: tuple[CheckpointRef, ...] = (), *, outdated: bool = False) -> Hands:
    before = running()
    places = tuple(before.places[rank] for rank in sorted(before.places))
    told = e.Adopted(1, places, ((0, 0),), outdated)
    opened = e.RunOpened(at=0.0, last_epoch=1, checkpoints=refs, adopted=told)
    hands = Hands.__new__(Hands)
    hands.places, hands.generations = dict(before.places), {0: 0}
    Hands.__init__(hands, SETTINGS, views("a", "b", "c"), opened)
    hands.places, hands.generations = dict(before.places), {0: 0}
    return hands


def test_workers_that_live_are_adopted_and_nothing_is_restarted() -> None:
    hands = adopted()
    assert hands.phases == ["running"]
    assert hands.all(c.StartWorkers) == hands.all(c.Reserve) == []
    hands.fail(0)
    assert hands.brain.epoch == 2


def test_a_part_that_an_adopted_rank_tells_again_is_not_committed_without_the_others() -> None:
    hands = adopted()
    hands.tell(e.Reported(at=0.0, epoch=1, generation=0, rank=0, upto=7, parts=(Part(7, "k7"),)))
    assert hands.all(c.CommitCheckpoint) == []
    hands.tell(e.Reported(at=0.0, epoch=1, generation=0, rank=1, upto=7, parts=(Part(7, "k7"),)))
    assert [rank for rank, _ in hands.last(c.CommitCheckpoint).checkpoint.parts] == [0, 1]


def test_what_an_earlier_driver_committed_is_not_committed_again() -> None:
    hands = adopted((CheckpointRef("k7", 1, 7),))
    for rank in (0, 1):
        hands.tell(e.Reported(at=0.0, epoch=1, generation=0, rank=rank, upto=7, parts=(Part(7, "k7"),)))
    assert hands.all(c.CommitCheckpoint) == []


def test_an_adopted_host_that_is_not_listed_is_lost() -> None:
    before = running()
    places = tuple(before.places[rank] for rank in sorted(before.places))
    opened = e.RunOpened(at=0.0, last_epoch=1, adopted=e.Adopted(1, places, ((0, 0),)))
    hands = Hands(SETTINGS, views("a", "c"), opened)
    assert {a.slice for a in hands.last(c.StartWorkers).assignments} == {"a", "c"}


def test_adopted_workers_with_old_code_change_over_at_their_next_checkpoint() -> None:
    hands = adopted(outdated=True)
    assert hands.last(c.AskCheckpoint).reason is c.AskReason.NEW_CODE
    assert hands.all(c.StopWorkers) == []
    hands.forget()
    hands.checkpoint(3)
    assert {command.host for command in hands.all(c.PrepareHost)} == {"a.0", "b.0"}, "with the new code"
    started = hands.last(c.StartWorkers)
    assert (started.epoch, started.checkpoint, started.reason) == (2, "e1-g0-k3", NEW_CODE)
    assert hands.all(c.RecoveryDecided) == [], "it costs no budget"
    assert hands.last(c.AskCheckpoint).reason is c.AskReason.NONE
    hands.forget()
    hands.checkpoint(1)
    assert hands.all(c.StopWorkers) == [], "once is enough"


def test_adopted_workers_with_old_code_that_fail_are_restarted_with_the_new() -> None:
    hands = adopted(outdated=True)
    hands.forget()
    hands.fail(1)
    assert {command.host for command in hands.all(c.PrepareHost)} == {"a.0", "b.0"}
    assert hands.last(c.StartWorkers).epoch == 2
    assert (TimerName.BOUNDARY, 0) not in hands.timers


def test_adopted_workers_with_old_code_that_never_save_are_not_waited_for_for_ever() -> None:
    hands = adopted(outdated=True)
    hands.pass_time(SETTINGS.deadlines.boundary_s)
    assert hands.last(c.StartWorkers).reason == NEW_CODE


def test_new_code_that_can_not_be_loaded_ends_the_run() -> None:
    hands = adopted(outdated=True)
    hands.silent.add(c.PrepareHost)
    hands.checkpoint(3)
    failure = Failure(Kind.LOAD, 0.0, "SyntaxError", host="a.0")
    hands.tell(e.HostUnprepared(at=0.0, host="a.0", failure=failure))
    assert hands.last(c.EndRun).outcome is Outcome.FAILED


@pytest.mark.parametrize("returned", [False, True])
def test_what_was_saved_and_can_not_be_kept_fails_the_run_even_if_every_rank_returned(returned: bool) -> None:
    hands = running()
    hands.silent.add(c.CommitCheckpoint)
    hands.checkpoint(1, (0, 1))
    if returned:
        hands.returns(0, 1)
    cause = Failure(Kind.CONFLICT, 0.0, "ranks 0 and 1 saved 'weights'")
    hands.tell(e.CommitFailed(at=0.0, folder="e1-g0-k1", reason=cause.message, cause=cause))
    end = hands.last(c.EndRun)
    assert (end.outcome, end.cause) == (Outcome.FAILED, cause)
