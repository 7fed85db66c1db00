"""What a later driver reads back: retention keeps what it should, and notices outlive their driver."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from everstep import CheckpointConfig
from everstep.control.commands import PreemptionSeen
from everstep.control.events import CheckpointRef, Notice
from everstep.driver import records
from everstep.driver.history import History, KeptCheckpoint, to_delete

scores = st.lists(st.one_of(st.floats(), st.none()), max_size=12)


@given(scores, st.integers(1, 5), st.sampled_from(["max", "min"]))
def test_retention_never_removes_the_newest_and_never_something_better_than_what_it_keeps(
    values: list[float | None], keep: int, order: str
) -> None:
    history = History()
    for n, value in enumerate(values):
        ref = CheckpointRef(f"c{n}", 1, n)
        history.checkpoints[ref.folder] = KeptCheckpoint(ref, {} if value is None else {"s": value}, None)
    config = CheckpointConfig(num_to_keep=keep, checkpoint_score_attribute="s", checkpoint_score_order=order)  # type: ignore[arg-type]
    gone = to_delete(history, config)
    if not values:
        return
    newest = f"c{len(values) - 1}"
    assert newest not in gone
    assert max(0, len(values) - keep - 1) <= len(gone) <= max(0, len(values) - keep)
    sign = 1 if order == "max" else -1

    def worth(folder: str) -> float:
        value = history.checkpoints[folder].metrics.get("s", math.nan)
        return -math.inf if math.isnan(value) else sign * value

    kept = [folder for folder in history.checkpoints if folder not in gone and folder != newest]
    assert all(worth(k) >= worth(g) for k in kept for g in gone)


def scored(*scores: float) -> History:
    history = History()
    for n, score in enumerate(scores):
        ref = CheckpointRef(f"c{n}", 1, n, order=n)
        history.checkpoints[ref.folder] = KeptCheckpoint(ref, {"eval": {"loss": score}}, None)
    return history


def test_the_best_is_kept_beside_the_newest() -> None:
    best = CheckpointConfig(1, "eval/loss", "min")
    assert to_delete(scored(3.0, 1.0, 2.0), best) == ["c0"]
    assert to_delete(scored(3.0, 2.0, 1.0), best) == ["c0", "c1"]
    assert to_delete(scored(3.0, 2.0, 1.0), CheckpointConfig(1)) == ["c0", "c1"]


def test_checkpoints_are_ranked_with_the_best_last() -> None:
    ranked = scored(3.0, 1.0, math.nan, 2.0).ranked("eval/loss", "min")
    assert [kept.ref.folder for kept in ranked] == ["c2", "c0", "c3", "c1"]
    assert [kept.ref.folder for kept in scored(3.0, 1.0).ranked(None, "max")] == ["c0", "c1"]


def test_a_score_is_found_in_nested_metrics_whose_names_have_slashes_too() -> None:
    history = History()
    for n, score in enumerate([9.0, 1.0, 2.0]):
        ref = CheckpointRef(f"c{n}", 1, n, order=n)
        history.checkpoints[ref.folder] = KeptCheckpoint(
            ref, {"eval": 0, "eval/main": {"top": {"1": score}}}, None
        )
    assert to_delete(history, CheckpointConfig(1, "eval/main/top/1")) == ["c1"]


def test_an_older_checkpoint_whose_upload_ends_later_stays_the_older_one() -> None:
    history = History()
    for index, order in [(2, 1), (3, 2), (1, 3)]:  # in the order of their commits
        ref = CheckpointRef(f"c{index}", 1, index, order=order)
        history.checkpoints[ref.folder] = KeptCheckpoint(ref, {"score": 0.0}, None)
    assert [kept.ref.folder for kept in history.in_order()] == ["c1", "c2", "c3"]
    assert to_delete(history, CheckpointConfig(2)) == ["c1"]
    assert to_delete(history, CheckpointConfig(2, "score")) == ["c1"], "of equal ones the newer is better"


def test_of_two_replica_groups_the_checkpoint_that_was_complete_later_is_the_newer_one() -> None:
    history = History()
    for group, index, order in [(0, 2, 1), (1, 1, 2), (0, 1, 3), (0, 3, 4)]:
        ref = CheckpointRef(f"g{group}.{index}", 1, index, group, order=order)
        history.checkpoints[ref.folder] = KeptCheckpoint(ref, {}, None)
    assert [kept.ref.folder for kept in history.in_order()] == ["g0.1", "g0.2", "g1.1", "g0.3"]


def opened(lease: int, at: float, wall: float) -> records.Opened:
    owner = records.Owner(host="h", boot="b", pid=1, started=0)
    return records.Opened(1, lease, owner, at, wall, "0", "run", 1, 1, "", "", "n")


def test_notices_are_kept_across_drivers_whose_clocks_differ_until_they_are_taken_back() -> None:
    history = History.of(
        [
            opened(1, at=50.0, wall=1050.0),
            PreemptionSeen(60.0, "a", 90.0, ("a.0",)),
            PreemptionSeen(61.0, "b", 95.0, ("b.0",)),
            PreemptionSeen(70.0, "b", None),
            opened(2, at=7.0, wall=1080.0),
        ]
    )
    assert history.notices_by(wall_ahead=1073.0) == (Notice("a", 17.0, ("a.0",)),)
