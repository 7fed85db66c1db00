"""What the page is made of, from journals: what every worker did, what went wrong, what was done again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.synthetic import WALL, opened, row, synthetic, write_journal
from everstep.control import commands as c
from everstep.control.budgets import Budget
from everstep.errors import JournalFormatError
from everstep.failures import Failure, Kind
from everstep.health.stragglers import Slowness
from everstep.journal import journal, records
from everstep.journal.history import History
from everstep.observe.page import as_json, static_page
from everstep.observe.texts import MOST
from everstep.observe.view import RunView
from everstep.storage.store import open_store
from everstep.topology.placement import Assignment

CRASH = Failure(Kind.SIGNAL, 19.0, "killed by SIGKILL", rank=1, host="host-0")


def view_of(tmp_path: Path, *found: records.AnyRecord) -> RunView:
    run = tmp_path / "run"
    write_journal(run, iter(found))
    view = RunView(open_store(str(run)))
    view.refresh()
    return view


def plain(tmp_path: Path, *found: records.AnyRecord) -> dict[str, Any]:
    """As a browser gets it."""
    return dict(json.loads(as_json(view_of(tmp_path, *found).as_plain())))


def places(*where: tuple[int, str, str, int]) -> list[records.Place]:
    return [records.Place(*one) for one in where]


TWO = places((0, "host-0", "slice-0", 0), (1, "host-0", "slice-0", 0))
FIRST = (
    opened(2),
    c.PhaseChanged(1.0, "placing", 0),
    records.Placed(2.0, TWO, []),
    c.PhaseChanged(2.0, "starting", 1),
    c.PhaseChanged(5.0, "running", 1),
    c.GroupStarted(5.0, 1, ((0, 0),), 2, 1, c.Rung.FIRST_START, "", None),
)


def recovered(at: float, attempt: int, cause: Failure, lost: int = 0) -> c.Recovered:
    phases = (1.0, 0.5, 0.0, 0.5, 2.0, 0.5, 0.25, 0.25)
    return c.Recovered(at, attempt, c.Rung.RESTART_IN_PLACE, cause, "hosts", lost, *phases, "storage, first")


AGAIN = (
    c.FailureSeen(20.0, CRASH),
    c.PhaseChanged(20.0, "stopping", 1),
    c.RecoveryDecided(20.5, CRASH, Budget.FAILURES, 1, 3, (), 0.0),
    c.PhaseChanged(20.5, "placing", 1),
    c.PhaseChanged(21.0, "starting", 2),
    c.PhaseChanged(23.0, "running", 2),
    c.GroupStarted(23.0, 2, ((0, 0),), 2, 1, c.Rung.RESTART_IN_PLACE, "", "first"),
    recovered(24.0, 2, CRASH, lost=2),
)


def states(track: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    return [(round(at - WALL, 3), state) for at, state in track]


# ---------------------------------------------------------------------- lanes


def test_a_lane_is_a_rank_in_its_place_and_follows_the_run(tmp_path: Path) -> None:
    timeline = plain(tmp_path, *FIRST, *AGAIN)["timeline"]
    assert [(lane["slice"], lane["host"], lane["rank"]) for lane in timeline["lanes"]] == [
        ("slice-0", "host-0", 0),
        ("slice-0", "host-0", 1),
    ]
    assert states(timeline["run"]) == [
        (0.0, "starting"),
        (5.0, "training"),
        (20.0, "restarting"),
        (20.5, "starting"),
        (23.0, "training"),
    ]


def test_a_worker_that_moves_has_a_lane_in_each_place(tmp_path: Path) -> None:
    moved = records.Placed(21.0, places((1, "host-7", "slice-1", 0)), [])
    lanes = plain(tmp_path, *FIRST, *AGAIN[:4], moved, *AGAIN[4:])["timeline"]["lanes"]
    spans = {(lane["slice"], lane["rank"]): lane["spans"] for lane in lanes}
    assert spans[("slice-0", 1)] == [[WALL + 2.0, WALL + 21.0]]
    assert spans[("slice-1", 1)] == [[WALL + 21.0, None]]
    assert spans[("slice-0", 0)] == [[WALL + 2.0, None]]


def test_a_replica_group_goes_its_own_way_while_it_is_replaced(tmp_path: Path) -> None:
    groups = places((0, "a", "s", 0), (1, "b", "t", 1))
    timeline = plain(
        tmp_path,
        opened(2),
        records.Placed(2.0, groups, []),
        c.PhaseChanged(5.0, "running", 1),
        c.FailureSeen(20.0, CRASH),
        c.RecoveryDecided(20.5, CRASH, Budget.FAILURES, 1, 3, (1,), 0.0),
        c.GroupsStarting(21.0, 1, ((1, 1),)),
        c.GroupStarted(23.0, 1, ((1, 1),), 2, 2, c.Rung.REPLACE_GROUPS, "", None),
    )["timeline"]
    assert states(timeline["run"]) == [(0.0, "starting"), (5.0, "training")]
    assert {g: states(track) for g, track in timeline["groups"].items()} == {
        "1": [(20.0, "restarting"), (21.0, "starting"), (23.0, "")]
    }


@pytest.mark.parametrize("taken_over", [True, False])
def test_time_without_a_driver_is_training_if_the_next_takes_the_workers_over(
    tmp_path: Path, taken_over: bool
) -> None:
    next_driver = [opened(2, at=40.0)]
    if taken_over:
        next_driver = [*next_driver, records.TakenOver(41.0, 1), c.PhaseChanged(41.0, "running", 1)]  # type: ignore[list-item]
    timeline = plain(tmp_path, *FIRST, records.Renewed(30.0), *next_driver)["timeline"]
    away = [(30.0, "driver away"), (40.0, "starting")]
    assert states(timeline["run"]) == [(0.0, "starting"), (5.0, "training"), *([] if taken_over else away)]


def test_a_journal_from_before_places_were_written_has_lanes_without_them(tmp_path: Path) -> None:
    lanes = plain(tmp_path, *(r for r in FIRST if not isinstance(r, records.Placed)))["timeline"]["lanes"]
    assert [(lane["rank"], lane["slice"]) for lane in lanes] == [(0, ""), (1, "")]


def assignment(rank: int, host: str) -> Assignment:
    return Assignment(rank, host, 0, 1, 0, 1, 2, "slice", 0, 1, 0, 1, rank, 2)


def test_a_driver_writes_only_what_is_new_about_places() -> None:
    history = History.of([opened(2)])
    first = history.placed(1.0, [assignment(0, "a"), assignment(1, "b")], others_stay=False)
    assert first is not None
    assert [place.host for place in first.places] == ["a", "b"]
    history.apply(first)
    assert history.placed(2.0, [assignment(0, "a"), assignment(1, "b")], others_stay=False) is None
    assert history.placed(3.0, [assignment(1, "b")], others_stay=True) is None
    assert history.placed(4.0, [assignment(0, "c")], others_stay=False) == records.Placed(
        4.0, places((0, "c", "slice", 0)), [1]
    )
    assert History.of(history.as_records()).places == history.places


# ---------------------------------------------------------------------- incidents


def test_an_incident_has_its_cause_its_traceback_its_phases_and_what_came_with_it(tmp_path: Path) -> None:
    cause = Failure(Kind.EXCEPTION, 19.0, "ValueError: no", rank=1, traceback="Traceback\nValueError: no")
    echo = Failure(Kind.EXCEPTION, 19.5, "connection reset", rank=0, echo=True)
    found = plain(
        tmp_path,
        *FIRST,
        c.FailureSeen(19.6, echo),
        c.FailureSeen(20.0, cause),
        c.RecoveryDecided(20.5, cause, Budget.FAILURES, 1, 3, (), 0.0),
        recovered(24.0, 2, cause, lost=2),
    )
    (incident,) = found["incidents"]
    text = found["texts"]
    assert text[incident["text"]] == "rank 1: ValueError: no"
    assert text[incident["cause"]["traceback"]] == "Traceback\nValueError: no"
    assert [text[other["text"]] for other in incident["others"]] == ["connection reset"]
    assert (incident["began"] - WALL, incident["until"] - WALL) == (19.0, 24.0)
    assert incident["budget"] == ["max_failures", 1, 3, 0.0]
    assert incident["recovery"]["phases"][0] == ["detect", 1.0]
    assert incident["recovery"]["steps_lost"] == 2


def test_an_incident_of_a_script_that_never_reports_is_over_when_its_workers_run(tmp_path: Path) -> None:
    silent = records.RecoveredWithoutReport(**msgspec.structs.asdict(AGAIN[-1]))
    [incident] = plain(tmp_path, *FIRST, *AGAIN[:-1], silent)["incidents"]
    assert incident["until"] == WALL + 23.75
    assert incident["recovery"]["steps_lost"] is None
    assert incident["recovery"]["seconds"] == 4.75
    assert "first step" not in dict(incident["recovery"]["phases"])


def test_a_straggler_is_an_incident_from_when_it_is_named_until_it_is_over(tmp_path: Path) -> None:
    def slow(at: float, rank: int, over: str = "") -> records.StragglerSeen:
        return records.StragglerSeen(at, 1, (rank,), "host-0", Slowness.COMPUTING, 0.25, over)

    view = plain(tmp_path, *FIRST, slow(10.0, 0), slow(11.0, 1), slow(12.0, 0, "recovered"), *AGAIN)
    found = [i for i in view["incidents"] if i["kind"] == "straggler"]
    assert [(i["ranks"], i["began"] - WALL, i["until"] - WALL) for i in found] == [
        ([0], 10.0, 12.0),
        ([1], 11.0, 23.0),  # all workers started anew
    ]
    text = view["texts"][found[0]["text"]]
    assert text == "rank 0 on host-0 is 25 % slower than its peers: computing"
    assert [i["note"] for i in found] == ["over: it recovered", "over: all workers restarted"]


def test_a_hang_has_the_stacks_of_all_ranks_and_is_one_incident(tmp_path: Path) -> None:
    (tmp_path / "run" / "hangs").mkdir(parents=True)
    (tmp_path / "run" / "hangs" / "1.txt").write_text("=== rank 1 (the others wait for this)")
    hang = Failure(Kind.HANG, 10.0, "no progress for 25 s", rank=1)
    found = plain(
        tmp_path,
        *FIRST,
        c.HangSeen(20.0, 1, (1,), "no progress for 25 s", "hangs/1.txt", "restart"),
        c.FailureSeen(20.0, hang),
        c.RecoveryDecided(20.5, hang, Budget.FAILURES, 1, 3, (), 0.0),
    )
    (incident,) = found["incidents"]
    assert (incident["kind"], incident["ranks"], incident["until"]) == ("hang", [1], None)
    assert incident["began"] == WALL + 10.0
    assert found["texts"][incident["stacks_text"]] == "=== rank 1 (the others wait for this)"


def test_a_failure_during_a_recovery_is_another_incident_and_one_recovery_ends_both(
    tmp_path: Path,
) -> None:
    other = Failure(Kind.EXIT, 21.5, "exit code 3", rank=0)
    found = plain(
        tmp_path,
        *FIRST,
        *AGAIN[:5],
        c.FailureSeen(22.0, other),
        c.RecoveryDecided(22.5, other, Budget.FAILURES, 2, 3, (), 0.0),
        recovered(26.0, 3, other),
    )
    first, second = found["incidents"]
    assert "another failure came" in first["note"]
    assert first["until"] == second["until"] == WALL + 26.0
    assert "recovery" in second


def test_a_journal_cannot_make_the_page_show_files_beside_its_run(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret")
    for at, path in enumerate(["../secret", str(tmp_path / "secret"), "hangs/../../secret"]):
        hang = c.HangSeen(20.0, 1, (1,), "hang", path, "warn")
        assert "a secret" not in json.dumps(plain(tmp_path / str(at), *FIRST, hang))


# ---------------------------------------------------------------------- metrics and checkpoints


def curves(found: dict[str, Any], name: str = "loss") -> list[tuple[int, bool, list[int]]]:
    pieces = next(curve["pieces"] for curve in found["metrics"]["curves"] if curve["name"] == name)
    return [(piece["attempt"], piece["redone"], piece["x"]) for piece in pieces]


def losses(*values: float) -> list[Any]:
    return [row(loss=value) for value in values]


def test_steps_since_the_checkpoint_that_a_restart_went_back_to_are_marked_as_redone(tmp_path: Path) -> None:
    found = plain(
        tmp_path,
        *FIRST,
        records.Metrics(1, 1, losses(5, 4, 3)),
        records.Committed(10.0, "first", 1, 3, row(loss=3.0), None),
        records.Metrics(1, 4, losses(2, 1)),
        *AGAIN[:-1],
        recovered(24.0, 2, CRASH, lost=3),  # another rank was a report ahead
        records.Metrics(2, 1, losses(2, 1, 0)),
    )
    assert curves(found) == [(1, False, [1, 2, 3]), (1, True, [4, 5]), (2, False, [4, 5, 6])]
    assert found["metrics"]["redone"] == 2


def test_a_restart_from_memory_goes_back_as_far_as_it_lost_steps(tmp_path: Path) -> None:
    started = c.GroupStarted(23.0, 2, ((0, 0),), 2, 1, c.Rung.RESTART_IN_PLACE, "", None, True)
    found = plain(
        tmp_path,
        *FIRST,
        records.Metrics(1, 1, losses(5, 4, 3)),
        *AGAIN[:-2],
        started,
        records.Metrics(2, 1, losses(3, 2)),
        recovered(24.0, 2, CRASH, lost=1),
        recovered(30.0, 2, CRASH, lost=0),
    )
    assert curves(found) == [(1, False, [1, 2]), (1, True, [3]), (2, False, [3, 4])]


def test_a_replica_group_that_was_replaced_goes_on_where_the_run_is(tmp_path: Path) -> None:
    found = plain(
        tmp_path, *FIRST, records.Metrics(1, 1, losses(5, 4)), records.Metrics(1, 1, losses(3), 0, 1)
    )
    assert curves(found) == [(1, False, [1, 2]), (1, False, [3])]


def test_numbers_that_are_none_and_names_in_dicts_are_kept_apart(tmp_path: Path) -> None:
    rows = [
        row(loss=math.nan, eval={"acc": 1}, note="text", ok=True),
        row(loss=math.inf),
    ]
    metrics = plain(tmp_path, *FIRST, records.Metrics(1, 1, rows))["metrics"]
    named = {curve["name"]: curve["pieces"][0]["y"] for curve in metrics["curves"]}
    assert named["loss"] == ["NaN", "Infinity"]
    assert named["eval/acc"] == [1.0]
    assert {"note", "ok"} & {*named} == set()


def test_a_long_curve_is_thinned_and_keeps_its_extremes(tmp_path: Path) -> None:
    values = [math.sin(i) for i in range(50_000)]
    values[31_337], values[40_000] = 1e6, math.nan
    (curve,) = plain(tmp_path, *FIRST, records.Metrics(1, 1, losses(*values)))["metrics"]["curves"]
    (piece,) = curve["pieces"]
    assert len(piece["x"]) < 4_000
    assert 1e6 in piece["y"]
    assert "NaN" in piece["y"]


def test_checkpoints_say_whether_they_are_there_and_why_not(tmp_path: Path) -> None:
    found = plain(
        tmp_path,
        *FIRST,
        *(records.Committed(10.0 + i, f"c{i}", 1, i, row(loss=math.nan), None) for i in range(3)),
        records.Deleted(14.0, "c0"),
        records.Damaged(15.0, "c1", "a file is short"),
    )["checkpoints"]
    assert [(each["folder"], each["status"]) for each in found["shown"]] == [
        ("c0", "deleted"),
        ("c1", "damaged"),
        ("c2", "kept"),
    ]
    assert found["shown"][2]["metrics"] == {"loss": "NaN"}


# ---------------------------------------------------------------------- what can be wrong with a journal


def test_a_run_that_is_being_written_is_read_on(tmp_path: Path) -> None:
    view = view_of(tmp_path, *FIRST)
    assert view.refresh() is False
    (tmp_path / "run" / journal.FOLDER / journal.key_of(2)).write_bytes(
        b"".join(map(records.encode, AGAIN))  # type: ignore[arg-type]
    )
    assert view.refresh() is True
    found = view.as_plain()
    assert found["state"] in ("running", "interrupted")
    assert len(found["incidents"]) == 1


def test_a_damaged_journal_says_so_and_the_rest_of_it_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_journal(run, synthetic(4, 200))
    damaged = run / journal.FOLDER / journal.key_of(2)
    data = bytearray(damaged.read_bytes())
    data[100] ^= 0xFF
    damaged.write_bytes(bytes(data))
    view = RunView(open_store(str(run)))
    view.refresh()
    found = view.as_plain()
    assert any("wrong checksum" in damage for damage in found["damage"])
    assert found["state"] == "finished"
    assert len(found["incidents"]) >= 198


def test_a_huge_traceback_is_cut_and_texts_are_there_once(tmp_path: Path) -> None:
    huge = Failure(Kind.EXCEPTION, 19.0, "no", rank=1, traceback="x" * 5_000_000)
    decided = c.RecoveryDecided(20.5, huge, Budget.FAILURES, 1, 3, (), 0.0)
    found = plain(tmp_path, *FIRST, c.FailureSeen(20.0, huge), decided, c.FailureSeen(30.0, huge))
    assert len(json.dumps(found)) < 3 * MOST
    assert "characters left out" in found["texts"][found["incidents"][0]["cause"]["traceback"]]


def test_nothing_in_a_journal_ends_the_element_that_it_stands_in(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    view = view_of(tmp_path, opened(1, name=evil), records.Metrics(1, 1, [row(**{evil: 1.0})]))
    page = static_page(view.as_plain())
    assert page.count("</script>") == 2
    assert page.count("<script") == 2
    assert "<!--" not in page
    assert "&lt;/script&gt;" in page


def test_what_no_everstep_has_written_is_refused_by_name(tmp_path: Path) -> None:
    unknown = c.RecoveryDecided(20.5, CRASH, "a budget", 1, 3, (), 0.0)  # type: ignore[arg-type]
    garbled = records.Committed(10.0, "first", 1, 3, msgspec.Raw(b"\x81\xa1\xff\x01"), None)
    for at, strange in enumerate([unknown, garbled]):
        with pytest.raises(JournalFormatError, match="a budget|can't be read"):
            view_of(tmp_path / str(at), *FIRST, strange)


def test_rows_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    rows = [msgspec.Raw(b"\x81\xa1\xff\x01"), *losses(1.0), msgspec.Raw(b"\x01")]
    assert curves(plain(tmp_path, *FIRST, records.Metrics(1, 1, rows))) == [(1, False, [2])]


def test_times_that_are_no_numbers_do_not_break_the_page(tmp_path: Path) -> None:
    found = plain(
        tmp_path, *FIRST, c.PhaseChanged(math.nan, "running", 1), c.PhaseChanged(math.inf, "ending", 1)
    )
    assert found["name"] == "synthetic"
