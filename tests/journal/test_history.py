"""What a later driver reads back: checkpoints with their scores and in their order, and notices."""

from __future__ import annotations

import math

import pytest

from everstep.control.commands import PreemptionSeen
from everstep.control.events import Notice
from everstep.journal import records
from everstep.journal.history import History, KeptCheckpoint
from everstep.saved.checkpoints import CheckpointRef


def scored(*scores: float) -> History:
    history = History()
    for n, score in enumerate(scores):
        ref = CheckpointRef(f"c{n}", 1, n, order=n)
        history.checkpoints[ref.folder] = KeptCheckpoint(ref, {"eval": {"loss": score}}, None)
    return history


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
    assert [one.score for one in history.scored("eval/main/top/1")] == [9.0, 1.0, 2.0]


def test_an_older_checkpoint_whose_upload_ends_later_stays_the_older_one() -> None:
    history = History()
    for index, order in [(2, 1), (3, 2), (1, 3)]:  # in the order of their commits
        ref = CheckpointRef(f"c{index}", 1, index, order=order)
        history.checkpoints[ref.folder] = KeptCheckpoint(ref, {"score": 0.0}, None)
    assert [kept.ref.folder for kept in history.in_order()] == ["c1", "c2", "c3"]


def test_of_two_replica_groups_the_checkpoint_that_was_complete_later_is_the_newer_one() -> None:
    history = History()
    for group, index, order in [(0, 2, 1), (1, 1, 2), (0, 1, 3), (0, 3, 4)]:
        ref = CheckpointRef(f"g{group}.{index}", 1, index, group, order=order)
        history.checkpoints[ref.folder] = KeptCheckpoint(ref, {}, None)
    assert [kept.ref.folder for kept in history.in_order()] == ["g0.1", "g0.2", "g1.1", "g0.3"]


def opened(lease: int, at: float, wall: float, boot: str = "", namespaces: str = "pid:[1]") -> records.Opened:
    owner = records.Owner(host="h", boot=boot, pid=lease, started=0, pid_namespace=namespaces)
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


@pytest.mark.parametrize("jump", [-86_400.0, -20.0, 20.0, 86_400.0])
@pytest.mark.parametrize("again", ["pid:[1]", "pid:[2]"])
def test_a_notice_is_not_moved_by_a_clock_that_was_set_between_two_drivers_of_one_machine(
    jump: float, again: str
) -> None:
    read = [
        opened(1, at=50.0, wall=1050.0, boot="b"),
        PreemptionSeen(60.0, "a", 90.0, ("a.0",)),
        opened(2, at=80.0, wall=1080.0 + jump, boot="b", namespaces=again),
    ]
    expected = (Notice("a", 90.0, ("a.0",)),)
    history = History.of(read)
    assert history.notices_by(wall_ahead=1000.0 + jump) == expected
    assert History.of(history.as_records()).notices_by(wall_ahead=1000.0 + jump) == expected


def test_a_monotonic_clock_of_another_boot_or_namespace_of_time_is_another_one() -> None:
    for boot, namespaces in [("c", "pid:[1] time:[1]"), ("b", "pid:[1] time:[2]")]:
        read = [
            opened(1, at=50.0, wall=1050.0, boot="b", namespaces="pid:[1] time:[1]"),
            PreemptionSeen(60.0, "a", 90.0, ("a.0",)),
            opened(2, at=7.0, wall=1080.0, boot=boot, namespaces=namespaces),
        ]
        assert History.of(read).notices_by(wall_ahead=1073.0) == (Notice("a", 17.0, ("a.0",)),)
