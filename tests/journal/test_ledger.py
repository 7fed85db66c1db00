"""Where a run's time went, from its journal: each second of each wanted worker once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from everstep import FailureConfig, Result, RunConfig, ScalingConfig, Trainer, report
from everstep.cli.runs import show
from everstep.control import commands as c
from everstep.control.budgets import Budget
from everstep.failures import Failure, Kind
from everstep.goodput import BADPUT, Category, Ledger, LedgerOverTime
from everstep.journal import journal, records
from everstep.journal.ledger import RunLedger

WALL = 1_000_000.0


def opened(at: float, workers: int = 4, wall: float | None = None) -> records.Opened:
    owner = records.Owner("host", "boot", 1, 1)
    wall = WALL + at if wall is None else wall
    return records.Opened(3, 1, owner, at, wall, "0", "run", workers, workers, "", "", "")


def started(
    at: float,
    world: int = 4,
    rung: c.Rung = c.Rung.FIRST_START,
    checkpoint: str | None = None,
    groups: tuple[int, ...] = (0,),
    from_memory: bool = False,
) -> c.GroupStarted:
    return c.GroupStarted(at, 1, tuple((g, 0) for g in groups), world, 1, rung, "", checkpoint, from_memory)


def phase(at: float, name: str) -> c.PhaseChanged:
    return c.PhaseChanged(at, name, 1)


def committed(at: float, folder: str, validation: bytes = b"") -> records.Committed:
    return records.Committed(at, folder, 1, 1, b"\x80", None, validation=validation)  # type: ignore[arg-type]


def validated(at: float, folder: str) -> records.Validated:
    return records.Validated(at, folder, "VALIDATED", b"\x80")  # type: ignore[arg-type]


def recovered(
    at: float,
    kind: Kind = Kind.SIGNAL,
    rung: c.Rung = c.Rung.RESTART_IN_PLACE,
    lost: int = 5,
) -> c.Recovered:
    """3 s until it was noticed, 1 to stop, 2 of waiting, 4 to start, 1.5 to restore, 0.5 for a step."""
    cause = Failure(kind, at - 12.0, "", rank=1)
    source = "storage, checkpoint, 3.0 s old"  # as the controller says it
    return c.Recovered(at, 2, rung, cause, "", lost, 3.0, 1.0, 2.0, 1.0, 2.0, 1.0, 1.5, 0.5, source)


def ledger(*found: records.AnyRecord) -> Ledger:
    """Of these records. Whatever they are, it adds up."""
    run = RunLedger()
    for record in found:
        run.apply(record)
    return run.until()


def seconds(of: Ledger) -> dict[str, float]:
    return {category.value: round(spent, 6) for category, spent in of.total.items() if spent}


FIRST = (opened(0.0), phase(0.5, "placing"), phase(2.0, "starting"), phase(5.0, "running"), started(5.0))
AGAIN = (phase(48.0, "stopping"), phase(49.0, "waiting"), phase(51.0, "starting"), phase(55.0, "running"))


def test_a_run_without_failures_starts_and_steps() -> None:
    found = ledger(*FIRST, phase(105.0, "ending"), phase(106.0, "ended"), records.Closed(106.0, "", "", None))
    assert seconds(found) == {"step": 400.0, "restart": 24.0}
    assert found.goodput == pytest.approx(400 / 424)


def test_time_from_the_end_of_training_to_the_last_record_is_the_runs() -> None:
    ended = (*FIRST, phase(105.0, "ended"), records.Closed(107.0, "", "", None))
    assert seconds(ledger(*ended)) == {"step": 400.0, "restart": 28.0}
    removed = records.Deleted(108.0, "checkpoint")
    assert seconds(ledger(*ended, removed)) == {"step": 400.0, "restart": 32.0}


def test_validations_after_the_end_of_training_are_no_restart() -> None:
    asked = [committed(at, f"checkpoint {at:g}", b"how") for at in (25.0, 45.0, 65.0)]
    beside = (*FIRST, *asked, validated(75.0, "checkpoint 25"), phase(105.0, "ending"), phase(107.0, "ended"))
    assert seconds(ledger(*beside)) == {"step": 400.0, "restart": 28.0}
    one_left = (*beside, validated(127.0, "checkpoint 45"))
    assert seconds(ledger(*one_left)) == {"step": 400.0, "restart": 28.0, "validation": 80.0}
    over = (*one_left, validated(157.0, "checkpoint 65"), records.Closed(158.0, "", "", None))
    assert seconds(ledger(*over)) == {"step": 400.0, "restart": 32.0, "validation": 200.0}
    resumed = (opened(200.0), phase(203.0, "running"), started(203.0), phase(213.0, "ended"))
    assert seconds(ledger(*over, *resumed)) == {"step": 440.0, "restart": 44.0, "validation": 200.0}


@pytest.mark.parametrize(
    "over", [records.Deleted(117.0, "checkpoint"), records.Damaged(117.0, "checkpoint", "")]
)
def test_a_checkpoint_that_is_gone_is_not_validated_any_longer(over: records.AnyRecord) -> None:
    asked = (*FIRST, committed(25.0, "checkpoint", b"how"), phase(107.0, "ended"))
    found = ledger(*asked, over, records.Closed(118.0, "", "", None))
    assert seconds(found) == {"step": 408.0, "restart": 24.0, "validation": 40.0}


def test_a_run_that_has_ended_is_as_long_as_its_journal_whenever_it_is_looked_at() -> None:
    run = RunLedger()
    for record in (*FIRST, records.Closed(106.0, "", "", None)):
        run.apply(record)
    assert run.until(5000.0).total == run.until().total


def test_a_failure_costs_what_its_recovery_took_and_the_steps_since_the_checkpoint() -> None:
    found = ledger(
        *FIRST,
        committed(25.0, "checkpoint"),
        *AGAIN,
        started(55.0, rung=c.Rung.RESTART_IN_PLACE, checkpoint="checkpoint"),
        recovered(57.0),
        phase(105.0, "ended"),
    )
    assert seconds(found) == {
        "step": 4 * (20.0 + 0.5 + 48.0),
        "redo": 4 * 20.0,
        "detect": 4 * 3.0,
        "restart": 4 * (5.0 + 1.0 + 4.0),
        "waiting for capacity": 4 * 2.0,
        "restore": 4 * 1.5,
    }


def test_time_in_which_a_script_trains_without_reports_is_training() -> None:
    """All of it until its end, which is when a record tells of the recovery."""
    again = recovered(57.0, lost=0)
    silent = records.RecoveredWithoutReport(**msgspec.structs.asdict(again))
    found = ledger(*FIRST, *AGAIN, started(55.0), silent, phase(60.0, "ended"))
    assert found.total == ledger(*FIRST, *AGAIN, started(55.0), again, phase(60.0, "ended")).total
    assert found.total[Category.REDO] == 0


def decided(at: float, kind: Kind = Kind.SIGNAL) -> c.RecoveryDecided:
    return c.RecoveryDecided(at, Failure(kind, at - 3.0, "", rank=1), Budget.FAILURES, 1, 2, (), 0.0)


def failed_again(kind: Kind = Kind.SIGNAL, *, from_memory: bool = False) -> tuple[Any, ...]:
    """Training fails at 45, which is noticed at 48; the start at 55 fails at 62, which is noticed at 65."""
    restarted = started(55.0, rung=c.Rung.RESTART_IN_PLACE, checkpoint="saved", from_memory=from_memory)
    return (
        *FIRST,
        committed(25.0, "saved"),
        phase(48.0, "stopping"),
        decided(48.0, kind),
        phase(49.0, "starting"),
        phase(55.0, "running"),
        restarted,
        phase(65.0, "stopping"),
        decided(65.0),
    )


def test_a_start_that_fails_before_its_first_report_has_trained_nothing() -> None:
    again = started(68.0, rung=c.Rung.RESTART_IN_PLACE, checkpoint="saved")
    over = (phase(68.0, "running"), again, recovered(74.0, lost=0), phase(105.0, "ended"))
    restarting = {"detect": 4 * (3.0 + 3.0), "waiting for capacity": 4 * 2.0, "restore": 4 * 1.5}
    assert seconds(ledger(*failed_again(), *over)) == {
        "step": 4 * (20.0 + 0.5 + 31.0),
        "redo": 4 * 20.0,
        "restart": 4 * (5.0 + 7.0 + 7.0 + 1.0 + 4.0),
        **restarting,
    }
    hung = ledger(*failed_again(Kind.HANG), *over)
    assert (hung.total[Category.HANG], hung.total[Category.DETECT]) == (4 * 3.0, 4 * 3.0)
    kept = ledger(*failed_again(from_memory=True), *over)
    assert (kept.total[Category.REDO], kept.total[Category.STEP]) == (0.0, 4 * (40.0 + 0.5 + 31.0))


def test_so_has_one_that_ends_the_run() -> None:
    ended = (phase(66.0, "ended"), records.Closed(66.0, "failed", "", None))
    assert seconds(ledger(*failed_again(), *ended)) == {
        "step": 4 * 20.0,
        "redo": 4 * 20.0,
        "detect": 4 * 3.0,
        "restart": 4 * (5.0 + 7.0 + 11.0),
    }


def test_a_start_after_which_anything_was_reported_has_trained() -> None:
    """Though not all ranks had reported, so that it had not recovered."""
    row = records.Metrics(1, 1, [msgspec.Raw(b"\x80")])
    ended = (phase(66.0, "ended"), records.Closed(66.0, "failed", "", None))
    assert ledger(*failed_again(), row, *ended).total[Category.STEP] == 4 * (43.0 + 10.0)


def test_without_a_checkpoint_every_step_is_done_again_and_with_a_snapshot_none() -> None:
    def redone(*, from_memory: bool) -> float:
        restarted = started(55.0, rung=c.Rung.RESTART_IN_PLACE, from_memory=from_memory)
        return ledger(*FIRST, *AGAIN, restarted, recovered(57.0)).total[Category.REDO]

    assert redone(from_memory=False) == 4 * 40.0
    assert redone(from_memory=True) == 0.0


def test_what_a_hang_took_until_it_was_noticed_is_a_hang() -> None:
    found = ledger(*FIRST, *AGAIN, started(55.0), recovered(57.0, Kind.HANG, lost=0))
    assert found.total[Category.HANG] == 4 * 3.0
    assert found.total[Category.DETECT] == 0.0


def test_a_hang_that_ends_the_run_is_a_hang_and_no_training() -> None:
    hang = c.FailureSeen(45.0, Failure(Kind.HANG, 15.0, "", rank=1))
    ended = (phase(45.0, "stopping"), phase(46.0, "ended"), records.Closed(46.0, "failed", "", None))
    assert seconds(ledger(*FIRST, hang, *ended)) == {"step": 40.0, "hang": 120.0, "restart": 24.0}
    recovers = ledger(*FIRST, hang, *AGAIN, started(55.0), recovered(57.0, Kind.HANG, lost=0))
    ends_later = ledger(
        *FIRST,
        hang,
        *AGAIN,
        started(55.0),
        recovered(57.0, Kind.HANG, lost=0),
        records.Closed(57.0, "failed", "", None),
    )
    assert seconds(ends_later) == seconds(recovers)


def test_workers_that_there_is_no_place_for_wait_for_capacity() -> None:
    found = ledger(*FIRST[:-1], started(5.0, world=3), phase(105.0, "ended"))
    assert seconds(found) == {"step": 300.0, "restart": 20.0, "waiting for capacity": 100.0}


def test_with_replica_groups_only_the_one_that_failed_is_charged() -> None:
    replaced = started(55.0, rung=c.Rung.REPLACE_GROUPS, groups=(1,))
    found = ledger(
        *FIRST[:-1],
        started(5.0, groups=(0, 1)),
        replaced,
        recovered(57.0, rung=c.Rung.REPLACE_GROUPS, lost=0),
        phase(105.0, "ended"),
    )
    assert seconds(found) == {
        "step": 2 * 100.0 + 2 * (40.0 + 0.5 + 48.0),
        "detect": 2 * 3.0,
        "restart": 4 * 5.0 + 2 * 5.0,
        "waiting for capacity": 2 * 2.0,
        "restore": 2 * 1.5,
    }


def test_workers_that_train_on_without_a_driver_make_steps() -> None:
    second = opened(0.0, wall=WALL + 65.0)
    over = (records.TakenOver(1.0, 1), phase(40.0, "ended"))
    assert seconds(ledger(*FIRST, records.Renewed(45.0), second, *over)) == {"step": 400.0, "restart": 20.0}


def test_without_a_take_over_that_time_is_lost() -> None:
    second = (
        opened(0.0, wall=WALL + 65.0),
        phase(5.0, "running"),
        started(5.0, rung=c.Rung.RESTART_IN_PLACE),
    )
    found = ledger(*FIRST, records.Renewed(45.0), *second, phase(40.0, "ended"))
    assert seconds(found) == {"step": 4 * (40.0 + 35.0), "restart": 4 * 10.0, "driver away": 4 * 20.0}


def test_time_between_an_end_and_a_new_beginning_is_not_the_runs() -> None:
    ended = (phase(10.0, "ended"), records.Closed(10.0, "stopped", "", None))
    found = ledger(*FIRST, *ended, opened(0.0, wall=WALL + 5000.0), phase(1.0, "running"), started(1.0))
    assert sum(found.total.values()) == pytest.approx(4 * 11.0)


def test_a_clock_that_was_set_back_takes_nothing_away() -> None:
    found = ledger(*FIRST, records.Renewed(45.0), opened(0.0, wall=WALL - 900.0), phase(30.0, "ended"))
    assert all(spent >= 0.0 for spent in found.total.values())


def test_thousands_of_recoveries_add_up() -> None:
    run = RunLedger()
    for record in FIRST:
        run.apply(record)
    at = 50.0
    for _ in range(2000):
        for record in (
            phase(at, "stopping"),
            phase(at + 9.0, "running"),
            started(at + 9.0),
            recovered(at + 11.0),
        ):
            run.apply(record)
        at += 50.0
    run.apply(phase(at, "ended"))
    assert sum(run.until().total.values()) == pytest.approx(4 * at, rel=1e-9)


def test_every_category_but_steps_has_a_name_in_ml_goodput() -> None:
    assert set(BADPUT) == set(Category) - {Category.STEP}
    found = Ledger()
    found.charge(Category.DETECT, 2, 0.0, 3.0)
    found.charge(Category.HANG, 1, 0.0, 3.0)
    assert found.badput()["OTHER"] == 9.0


def stalled(at: float, spent: float, group: int = 0, upto: int = 1) -> records.Stalled:
    return records.Stalled(at, 1, group, 0, upto, spent)


def test_time_that_training_stands_still_for_checkpoints_is_no_step() -> None:
    found = ledger(*FIRST, stalled(25.0, 6.0), stalled(65.0, 4.0), phase(105.0, "ended"))
    assert seconds(found) == {"step": 360.0, "checkpoint stall": 40.0, "restart": 20.0}


def test_stalls_are_told_later_than_they_were_and_of_steps_only() -> None:
    late = ledger(*FIRST, phase(45.0, "stopping"), stalled(44.0, 3.0), phase(55.0, "ended"))
    assert seconds(late) == {"step": 4 * 37.0, "checkpoint stall": 4 * 3.0, "restart": 4 * 15.0}
    too_much = ledger(*FIRST, stalled(25.0, 500.0))
    assert seconds(too_much) == {"checkpoint stall": 4 * 20.0, "restart": 20.0}


def test_a_stall_belongs_to_its_replica_group() -> None:
    found = ledger(
        *FIRST[:-1], started(5.0, groups=(0, 1)), stalled(25.0, 6.0, group=1), phase(105.0, "ended")
    )
    assert seconds(found) == {"step": 400.0 - 12.0, "checkpoint stall": 12.0, "restart": 20.0}


def test_stalls_before_a_commit_stay_what_they_were_when_steps_after_it_are_lost() -> None:
    found = ledger(
        *FIRST,
        stalled(25.0, 6.0),
        committed(25.0, "checkpoint"),
        *AGAIN,
        started(55.0, rung=c.Rung.RESTART_IN_PLACE, checkpoint="checkpoint"),
        recovered(57.0),
        phase(105.0, "ended"),
    )
    assert found.total[Category.CHECKPOINT] == 4 * 6.0
    assert found.total[Category.REDO] == 4 * 20.0


def test_a_wish_for_more_workers_than_an_earlier_driver_had_is_waited_for_from_then_on() -> None:
    second = (opened(0.0, workers=6, wall=WALL + 45.0), records.TakenOver(1.0, 1), phase(11.0, "ended"))
    found = ledger(*FIRST, records.Renewed(45.0), *second)
    assert sum(found.total.values()) == pytest.approx(4 * 45.0 + 6 * 11.0)


def test_over_time_the_same_seconds_are_in_slices_in_which_they_were_spent() -> None:
    run = RunLedger()
    for record in (*FIRST, stalled(25.0, 6.0), committed(25.0, "checkpoint"), phase(105.0, "ended")):
        run.apply(record)
    found = run.over_time()
    assert found.total == run.until().total
    assert found.began == WALL
    assert len(found.slices) * found.width == pytest.approx(105.0, abs=found.width)
    assert all(sum(each.values()) == pytest.approx(4 * found.width) for each in found.slices[:-1])
    at = {second: found.slices[int(second / found.width)] for second in (1.0, 10.0, 23.0, 50.0)}
    assert [[*each] for each in at.values()] == [
        [Category.RESTART],
        [Category.STEP],
        [Category.CHECKPOINT],
        [Category.STEP],
    ]


def test_slices_become_wider_as_a_run_becomes_longer() -> None:
    run = LedgerOverTime()
    for second in range(100_000):
        run.charge(Category.STEP if second % 2 else Category.REDO, 2, float(second), second + 1.0)
    assert len(run.slices) <= LedgerOverTime.MOST
    assert run.width * len(run.slices) >= 100_000
    assert sum(sum(each.values()) for each in run.slices) == pytest.approx(200_000.0)
    assert all(each[Category.STEP] == pytest.approx(each[Category.REDO]) for each in run.slices[:-1])


_PHASES = ("placing", "starting", "running", "stopping", "waiting", "backoff", "settling", "ending", "ended")
_MOMENTS = st.one_of(
    st.sampled_from(_PHASES).map(lambda name: lambda at: phase(at, name)),
    st.tuples(st.integers(0, 4), st.sampled_from(list(c.Rung)), st.booleans()).map(
        lambda of: lambda at: started(at, of[0], of[1], "checkpoint", (0, 1), of[2])
    ),
    st.sampled_from(list(c.Rung)).map(lambda rung: lambda at: recovered(at, rung=rung)),
    st.floats(0.0, 100.0).map(lambda spent: lambda at: stalled(at, spent)),
    st.just(lambda at: committed(at, "checkpoint")),
    st.just(records.Renewed),
    st.just(opened),
    st.just(lambda at: records.TakenOver(at, 1)),
    st.just(lambda at: records.Closed(at, "stopped", "", None)),
)


@given(st.lists(st.tuples(st.floats(0.0, 50.0), _MOMENTS), max_size=60))
def test_whatever_happens_each_second_of_each_wanted_worker_is_counted_once(
    moments: list[tuple[float, Any]],
) -> None:
    """Also through the ends of drivers and of the run. Time between its end and its resumption isn't its."""
    run, at, whole, closed = RunLedger(), 0.0, 0.0, False
    run.apply(opened(at))
    for later, make in moments:
        record = make(at + later)
        if not (closed and isinstance(record, records.Opened)):
            whole += later
        at += later
        closed = isinstance(record, records.Closed) or (closed and not isinstance(record, records.Opened))
        run.apply(record)
    found, sliced = run.until(), run.over_time().slices
    assert sum(found.total.values()) == pytest.approx(4 * whole, rel=1e-6, abs=1e-6)
    assert sum(map(sum, map(dict.values, sliced))) == pytest.approx(4 * whole, rel=1e-6, abs=1e-6)
    assert all(spent >= -1e-6 for spent in found.total.values())


def length_of(run: Path) -> float:
    """Seconds from the first record that has a time to the last, by the clock of one driver."""
    read = [r.at for r in journal.read(run) if not isinstance(r, records.Metrics | records.Compacted)]
    return read[-1] - read[0]


def _dies_once(config: dict[str, str]) -> None:
    died = Path(config["died"])
    report({"step": 1})
    if not died.exists():
        died.touch()
        raise ValueError("once")
    report({"step": 2})


def test_a_real_run_is_accounted_for_in_whole(tmp_path: Path) -> None:
    result = Trainer(
        _dies_once,
        train_loop_config={"died": str(tmp_path / "died")},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert 0.0 < result.goodput < 1.0
    assert result.ledger["restart"] > 0.0
    again = Result.from_path(str(tmp_path / "run"))
    assert again.ledger == pytest.approx(result.ledger)
    assert sum(result.ledger.values()) == pytest.approx(length_of(tmp_path / "run"), rel=1e-3)
    told = json.loads(CliRunner().invoke(show, [str(tmp_path / "run"), "--json"]).output)
    assert told["goodput"] == pytest.approx(result.goodput)
    assert told["seconds"] == pytest.approx(result.ledger)
    assert told["badput"]["PROGRAM_STARTUP"] == pytest.approx(result.ledger["restart"])
    assert "goodput       " in CliRunner().invoke(show, [str(tmp_path / "run")]).output
