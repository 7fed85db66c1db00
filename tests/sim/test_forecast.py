"""Forecasts: every second of every host is accounted for, and the figures are what arithmetic says."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from everstep.forecast.answer import ForecastAnswer, advise, ask, best_interval_s
from everstep.forecast.outages import TraceError, load_trace, read_trace, with_notices
from everstep.forecast.plot import PlotUnavailable, plot
from everstep.forecast.presets import PRESETS
from everstep.forecast.question import EVERSTEP, FULL_RESTART, POLICIES, ForecastQuestion, Policy
from everstep.goodput import Category

QUIET = ForecastQuestion(slices=8, days=1.0, mtbf_h=None, checkpoint_every_s=600.0, checkpoint_cost_s=6.0)
BUSY = ForecastQuestion(slices=8, hosts_per_slice=2, spares=1, days=10.0, mtbf_h=300.0, repair_h=6.0, seed=3)


def trace(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def change(question: ForecastQuestion, **changes: object) -> ForecastQuestion:
    return msgspec.structs.replace(question, **changes)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    "question",
    [
        QUIET,
        BUSY,
        change(BUSY, min_slices=4),
        change(BUSY, replica_groups=True),
        change(BUSY, replica_groups=True, min_slices=4),
        change(BUSY, spares=0, host_share=1.0),
        change(BUSY, host_share=0.0),
        PRESETS["bamboo-p3"].question,
        change(BUSY, min_slices=4, snapshot_every_s=20.0),
        change(BUSY, replica_groups=True, min_slices=4, snapshot_every_s=20.0),
        change(PRESETS["bamboo-p3"].question, snapshot_every_s=5.0),
    ],
    ids=[
        "quiet",
        "fixed",
        "elastic",
        "groups",
        "elastic groups",
        "no spares",
        "crashes",
        "trace",
        "elastic snapshots",
        "snapshots of groups",
        "snapshots on the trace",
    ],
)
def test_every_second_of_every_host_is_in_one_category(question: ForecastQuestion, policy: Policy) -> None:
    answer = ask(question, policy)
    assert sum(answer.shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(share >= 0.0 for share in answer.shares.values())
    assert sum(answer.host_hours.values()) == pytest.approx(question.hosts * question.days * 24)
    for piece in answer.pieces:
        assert sum(piece.values()) == pytest.approx(1.0, abs=1e-6)


def test_without_failures_goodput_is_what_checkpoints_leave() -> None:
    answer = ask(QUIET, EVERSTEP)
    assert answer.goodput == pytest.approx(600.0 / 606.0, abs=1e-3)
    assert answer.shares["checkpoint stall"] == pytest.approx(6.0 / 606.0, abs=1e-3)
    assert answer.restarts == {"first start": 1}
    assert answer.steps_lost == 0


def test_a_lost_host_costs_what_was_not_saved_and_the_recovery(tmp_path: Path) -> None:
    lines = [f"0,add,node{i}" for i in range(5)]
    question = change(QUIET, slices=4, days=0.1, trace=trace(tmp_path, *lines, "3000000,remove,node2"))
    answer = ask(question, EVERSTEP)
    start = EVERSTEP.phases.prepare_s + EVERSTEP.phases.start_s + EVERSTEP.phases.restore_s + 0.01
    lost_s = (3000.0 - start) % 606.0
    assert answer.host_failures == 1
    assert answer.restarts == {"first start": 1, "replace the lost hosts": 1}
    assert answer.steps_lost == pytest.approx(lost_s, abs=0.1)
    assert answer.shares["redo"] * question.seconds == pytest.approx(lost_s, abs=0.1)
    assert answer.recovery_s == pytest.approx(1.5 + 0.022 + 0.01 + 2.2 + 0.07 + 0.062, abs=0.01)


def test_a_notice_saves_the_steps_that_a_loss_costs(tmp_path: Path) -> None:
    lines = [f"0,add,node{i}" for i in range(5)]
    question = change(
        QUIET, slices=4, days=0.1, notice_s=120.0, trace=trace(tmp_path, *lines, "3000000,remove,node2")
    )
    told, untold = ask(question, EVERSTEP), ask(question, FULL_RESTART)
    assert told.steps_lost < 2
    assert untold.steps_lost > 100
    assert told.goodput > untold.goodput


SNAPSHOTS = change(QUIET, slices=4, days=0.1, snapshot_every_s=9.5, snapshot_cost_s=0.5)
"""A snapshot is whole every 10 s."""
BEGAN_S = EVERSTEP.phases.prepare_s + EVERSTEP.phases.start_s + EVERSTEP.phases.restore_s + 0.01


@pytest.mark.parametrize(
    ("gone", "change_of", "snapshots_lost", "from_memory"),
    [
        (["node2"], {}, 1, True),  # the copies of the newest weren't all made
        (["node2"], {"replicated": True}, 0, True),
        (["node1", "node2"], {}, None, False),  # a host, and the one that has its copy
        (["node1", "node3"], {}, 1, True),
        (["node1", "node2"], {"snapshot_copies": 2}, 1, True),
        (["node1", "node2"], {"replicated": True}, 0, True),
        (["node2"], {"snapshot_copies": 0}, None, False),
    ],
    ids=lambda value: str(value),
)
def test_the_state_comes_from_the_newest_snapshot_of_which_enough_is_left(
    tmp_path: Path,
    gone: list[str],
    change_of: dict[str, object],
    snapshots_lost: int | None,
    from_memory: bool,
) -> None:
    lines = [*(f"0,add,node{i}" for i in range(7)), *(f"3000000,remove,{node}" for node in gone)]
    answer = ask(change(SNAPSHOTS, trace=trace(tmp_path, *lines), **change_of), EVERSTEP)
    since_checkpoint = (3000.0 - BEGAN_S) % 606.0
    expected = since_checkpoint if snapshots_lost is None else since_checkpoint % 10.0 + 10.0 * snapshots_lost
    assert answer.steps_lost == pytest.approx(expected, abs=0.1)
    assert answer.shares["redo"] * SNAPSHOTS.seconds == pytest.approx(0.95 * expected, abs=0.1)
    phases = EVERSTEP.phases
    restores = phases.restore_memory_s if from_memory else phases.restore_s
    restored = answer.shares["restore"] * SNAPSHOTS.seconds
    assert restored == pytest.approx(phases.restore_s + restores, abs=0.01)
    assert sum(answer.shares.values()) == pytest.approx(1.0, abs=1e-9)


def test_what_snapshots_cost_is_in_the_stalls_and_only_for_who_takes_them() -> None:
    plain = ask(QUIET, EVERSTEP).shares["checkpoint stall"]
    question = change(QUIET, snapshot_every_s=9.5, snapshot_cost_s=0.5)
    stalls = ask(question, EVERSTEP).shares["checkpoint stall"]
    assert stalls == pytest.approx(plain + 0.05 * (1 - plain), abs=1e-3)
    assert ask(question, FULL_RESTART).shares["checkpoint stall"] == pytest.approx(plain, abs=1e-3)


@pytest.mark.parametrize("where", [{"replicated": True}, {"snapshot_copies": 2}], ids=["ddp", "sharded"])
def test_with_snapshots_hardly_any_of_the_trace_is_lost_with_the_hosts(where: dict[str, object]) -> None:
    before = change(PRESETS["bamboo-p3"].question, notice_s=0.0, checkpoint_every_s=600.0)
    slow = msgspec.structs.replace(EVERSTEP, phases=msgspec.structs.replace(EVERSTEP.phases, restore_s=30.0))
    without = ask(before, slow).shares
    assert without["redo"] + without["restore"] > 0.3
    shares = ask(change(before, snapshot_every_s=5.0, snapshot_cost_s=0.1, **where), slow).shares
    assert shares["redo"] + shares["restore"] < 0.03


def test_with_replica_groups_the_others_never_stop(tmp_path: Path) -> None:
    lines = [f"0,add,node{i}" for i in range(5)]
    question = change(QUIET, slices=4, days=0.1, trace=trace(tmp_path, *lines, "3000000,remove,node2"))
    alone = ask(question, EVERSTEP)
    groups = ask(change(question, replica_groups=True), EVERSTEP)
    assert groups.restarts == {"first start": 1, "replace the failed replica groups": 1}
    assert groups.steps_lost == 0
    assert groups.goodput > alone.goodput


SLOW = msgspec.structs.replace(
    EVERSTEP, phases=msgspec.structs.replace(EVERSTEP.phases, prepare_s=200.0, start_s=90.0, restore_s=33.0)
)


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "replica groups"])
def test_a_host_that_is_lost_while_its_group_restores_ends_that(tmp_path: Path, groups: bool) -> None:
    """Its replacement is lost 10 s into restoring, and again as late as can be: within the time in which a
    loss isn't noticed.
    """
    lines = [f"0,add,node{i}" for i in range(7)]
    restores = 3000.0 + 1.5 + 0.01 + 200.0 + 90.0 + (0.0 if groups else 0.022)
    question = change(QUIET, slices=4, days=0.1, replica_groups=groups)
    once = ask(change(question, trace=trace(tmp_path, *lines, "3000000,remove,node2")), SLOW)
    for into in (10.0, 32.5):
        again = f"{1000 * (restores + into):.0f},remove,node4"
        twice = ask(change(question, trace=trace(tmp_path, *lines, "3000000,remove,node2", again)), SLOW)
        hosts, in_all = 1 if groups else 4, 4 * question.seconds
        more = {name: (share - once.shares[name]) * in_all for name, share in twice.shares.items()}
        assert twice.host_failures == 2
        assert more["restore"] == pytest.approx(hosts * into, abs=hosts * 0.3)
        assert more["detect"] == pytest.approx(hosts * 1.5, abs=0.1)
        assert more["restart"] == pytest.approx(hosts * 291.0, abs=hosts * 0.3)  # with a pause of 1 s
        assert twice.steps_lost == pytest.approx(once.steps_lost, abs=0.1)
        assert once.recovery_s is not None
        # Two losses, one interruption.
        assert twice.recovery_s == pytest.approx(once.recovery_s + into + 1.5 + 291.0, abs=0.5)


def test_a_group_that_restores_again_restores_all_of_it(tmp_path: Path) -> None:
    """It is back at restoring before the first time would have been over."""
    slow = msgspec.structs.replace(EVERSTEP, phases=msgspec.structs.replace(EVERSTEP.phases, restore_s=33.0))
    lines = [f"0,add,node{i}" for i in range(7)]
    lost = ["3000000,remove,node2", "3010000,remove,node4"]
    question = change(QUIET, slices=4, days=0.1, replica_groups=True)
    answer = ask(change(question, trace=trace(tmp_path, *lines, *lost)), slow)
    restored = answer.shares["restore"] * 4 * question.seconds
    assert restored == pytest.approx(4 * 33.0 + (10.0 - 1.5 - 0.01 - 2.2 - 0.07) + 33.0, abs=0.3)


def test_the_trace_goes_through_with_slow_recoveries() -> None:
    question = change(PRESETS["bamboo-p3"].question, replica_groups=True, slices=12, min_slices=12)
    assert sum(ask(question, SLOW).shares.values()) == pytest.approx(1.0, abs=1e-9)


def test_a_replica_group_without_a_place_waits_for_capacity(tmp_path: Path) -> None:
    lines = [f"0,add,node{i}" for i in range(4)]
    taken = trace(tmp_path, *lines, "4320000,remove,node2")  # for good, after half the time
    question = change(QUIET, slices=4, min_slices=1, days=0.1, trace=taken, replica_groups=True)
    shares = ask(question, EVERSTEP).shares
    assert shares["waiting for capacity"] == pytest.approx(1 / 8, abs=0.01)
    assert shares["detect"] < 0.01


def test_spares_and_elasticity_save_waiting() -> None:
    none = change(BUSY, spares=0)
    waiting = Category.WAITING.value
    assert ask(change(BUSY, spares=3), EVERSTEP).shares[waiting] < ask(none, EVERSTEP).shares[waiting]
    assert ask(change(none, min_slices=4), EVERSTEP).goodput > ask(none, EVERSTEP).goodput


def test_the_same_question_has_the_same_answer() -> None:
    assert ask(BUSY, EVERSTEP) == ask(BUSY, EVERSTEP)
    assert ask(BUSY, EVERSTEP) != ask(change(BUSY, seed=4), EVERSTEP)


def test_what_is_advised_helps_when_it_is_done() -> None:
    question = change(BUSY, spares=0, checkpoint_every_s=7200.0)
    answer = ask(question, EVERSTEP)
    advice = advise(question, EVERSTEP, answer)
    assert {one.change.split()[0] for one in advice} >= {"--checkpoint-every-s", "--spares", "--min-slices"}
    assert [one.gain for one in advice] == sorted((one.gain for one in advice), reverse=True)
    interval = best_interval_s(question, answer)
    assert interval is not None
    better = ask(change(question, checkpoint_every_s=float(f"{interval:.2g}")), EVERSTEP)
    gain = next(one.gain for one in advice if one.change.startswith("--checkpoint"))
    assert better.goodput == pytest.approx(answer.goodput + gain)


# ---------------------------------------------------------------------- traces


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["0,add"], "line 1: expected 'milliseconds,add|remove,node', got '0,add'"),
        (["0,add,a", "x,remove,a"], "line 2: expected"),
        (["0,vanish,a"], "got '0,vanish,a'"),
        (["5,add,a", "1,add,b"], "line 2: its time is before that of the line above"),
        ([], "is empty"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_with_its_line(lines: list[str], told: str) -> None:
    with pytest.raises(TraceError, match=".*" + told.replace("|", r"\|").replace(".", r"\.")):
        read_trace(lines, "t.csv")


def test_notices_come_before_their_loss_and_not_before_their_host() -> None:
    outages = with_notices(read_trace(["0,add,a", "500000,add,b", "550000,remove,b"], "t"), 120.0)
    assert [(o.at, o.kind, o.host) for o in outages if o.kind == "notice"] == [(500.0, "notice", "b")]


def test_the_trace_that_is_shipped_can_be_read_and_has_its_licence() -> None:
    from everstep.forecast.outages import TRACES

    assert len(load_trace("bamboo-ec2-p3")) == 344
    assert "MIT License" in (TRACES / "bamboo-ec2-p3.LICENSE.txt").read_text()


# ---------------------------------------------------------------------- the picture


def answers() -> list[ForecastAnswer]:
    return [ask(QUIET, policy) for policy in POLICIES.values()]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    plot(QUIET, answers(), tmp_path / "out.png", "a title")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotUnavailable, match=r"pip install 'everstep\[plot\]'"):
        plot(QUIET, answers(), tmp_path / "out.png", "a title")
