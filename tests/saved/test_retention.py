"""Which checkpoints retention removes."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, strategies as st

from everstep.saved.checkpoints import CheckpointRef, in_order
from everstep.saved.retention import Scored, ranked, to_remove

ORDERS = st.sampled_from(["max", "min"])
KEEP = st.integers(1, 5)
# Few different scores, so that ties are frequent.
SCORES = st.none() | st.sampled_from([-math.inf, -1.0, 0.0, 2.0, math.inf, math.nan]) | st.floats()


@st.composite
def committed(draw: st.DrawFn) -> list[Scored]:
    """In the order of their commits, which need not be that in which they were complete or reported."""
    reports = draw(
        st.lists(
            st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(0, 1), st.integers(1, 9)),
            unique=True,
            max_size=12,
        )
    )
    orders = draw(st.permutations(range(1, len(reports) + 1)))
    return [
        Scored(
            CheckpointRef("c{}.{}.{}.{}".format(*report), epoch, index, group, generation, order),
            draw(SCORES),
            draw(st.booleans()),
        )
        for (report, order) in zip(reports, orders, strict=True)
        for (epoch, group, generation, index) in (report,)
    ]


def numbered(*scores: float | None) -> list[Scored]:
    """One after the other."""
    return [Scored(CheckpointRef(f"c{n}", 1, n, order=n), score) for n, score in enumerate(scores, 1)]


def validated(checkpoints: list[Scored]) -> list[Scored]:
    """None waits for that any more."""
    return [msgspec.structs.replace(one, is_pending=False) for one in checkpoints]


def newest_of(checkpoints: list[Scored]) -> str:
    return in_order((one.ref for one in checkpoints), ())[-1].folder


def worth(one: Scored, order: str) -> float:
    if one.score is None or math.isnan(one.score):
        return -math.inf
    return one.score * (1 if order == "max" else -1)


@given(committed(), KEEP, ORDERS)
def test_the_newest_and_those_that_wait_for_their_validation_are_never_removed(
    checkpoints: list[Scored], keep: int, order: str
) -> None:
    gone = to_remove(checkpoints, (), num_to_keep=keep, order=order)
    assert gone == list(dict.fromkeys(gone)), "each once"
    assert {*gone} <= {one.ref.folder for one in checkpoints if not one.is_pending}
    assert not checkpoints or newest_of(checkpoints) not in gone


@given(committed(), KEEP, ORDERS)
def test_what_remains_is_as_many_as_were_asked_for_and_perhaps_the_newest(
    checkpoints: list[Scored], keep: int, order: str
) -> None:
    checkpoints = validated(checkpoints)
    gone = to_remove(checkpoints, (), num_to_keep=keep, order=order)
    left = {one.ref.folder for one in checkpoints} - {*gone}
    assert min(keep, len(checkpoints)) <= len(left) <= keep + 1
    if len(left) > keep:
        best = {one.ref.folder for one in ranked(checkpoints, (), order)[-keep:]}
        assert left - best == {newest_of(checkpoints)}


@given(committed(), KEEP, ORDERS)
def test_nothing_is_removed_that_is_better_than_something_that_is_kept_beside_the_newest(
    checkpoints: list[Scored], keep: int, order: str
) -> None:
    checkpoints = validated(checkpoints)
    gone = {*to_remove(checkpoints, (), num_to_keep=keep, order=order)}
    newest = newest_of(checkpoints) if checkpoints else ""
    kept = [one for one in checkpoints if one.ref.folder not in {*gone, newest}]
    removed = [one for one in checkpoints if one.ref.folder in gone]
    assert all(worth(better, order) >= worth(worse, order) for better in kept for worse in removed)


@given(committed(), KEEP, ORDERS, st.data())
def test_it_does_not_matter_in_which_order_they_were_committed(
    checkpoints: list[Scored], keep: int, order: str, data: st.DataObject
) -> None:
    again = data.draw(st.permutations(checkpoints))
    for_one = to_remove(checkpoints, (), num_to_keep=keep, order=order)
    assert to_remove(again, (), num_to_keep=keep, order=order) == for_one


@given(committed(), KEEP, ORDERS)
def test_when_they_are_removed_there_is_nothing_more_to_remove(
    checkpoints: list[Scored], keep: int, order: str
) -> None:
    gone = {*to_remove(checkpoints, (), num_to_keep=keep, order=order)}
    left = [one for one in checkpoints if one.ref.folder not in gone]
    newest: dict[tuple[int, int, int], CheckpointRef] = {}
    for one in sorted((one.ref for one in checkpoints if one.ref.folder in gone), key=lambda ref: ref.index):
        newest[one.epoch, one.group, one.generation] = one
    assert to_remove(left, newest.values(), num_to_keep=keep, order=order) == []


@given(committed(), ORDERS)
def test_all_are_kept_where_no_number_is_given(checkpoints: list[Scored], order: str) -> None:
    assert to_remove(checkpoints, (), num_to_keep=None, order=order) == []


@pytest.mark.parametrize("order", ["max", "min"])
@pytest.mark.parametrize("worst", [math.nan, None])
def test_nan_and_no_score_at_all_are_worst_whatever_is_best(order: str, worst: float | None) -> None:
    checkpoints = numbered(1.0, worst, -5.0, 7.0)
    assert to_remove(checkpoints, (), num_to_keep=3, order=order) == ["c2"]
    assert ranked(checkpoints, (), order)[0].ref.folder == "c2"


def test_the_best_is_kept_beside_the_newest() -> None:
    assert to_remove(numbered(3.0, 1.0, 2.0), (), num_to_keep=1, order="min") == ["c1"]
    assert to_remove(numbered(3.0, 2.0, 1.0), (), num_to_keep=1, order="min") == ["c1", "c2"]
    assert to_remove(numbered(None, None, None), (), num_to_keep=1) == ["c1", "c2"]


def test_of_equal_ones_the_newer_is_better_also_where_its_upload_ended_earlier() -> None:
    by_commit = [Scored(CheckpointRef(f"c{k}", 1, k, order=n), 0.0) for k, n in [(2, 1), (3, 2), (1, 3)]]
    assert to_remove(by_commit, (), num_to_keep=2) == ["c1"]


def test_one_that_waits_for_its_validation_counts_among_those_that_are_kept() -> None:
    first, *others = numbered(1.0, 2.0, 3.0, 4.0)
    waiting = [msgspec.structs.replace(first, is_pending=True), *others]
    assert to_remove(waiting, (), num_to_keep=2) == ["c2"]
