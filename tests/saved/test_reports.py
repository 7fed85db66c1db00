"""Which reports make a checkpoint: for every order in which ranks come to it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from everstep.identity import Incarnation
from everstep.saved.checkpoints import CheckpointRef, Checkpoints
from everstep.saved.reports import CompleteCheckpoint, Part, ReportBook, Settled


def part(index: int) -> Part:
    return Part(index, f"k{index}")


def book(ranks: int = 2, after: int = 0) -> ReportBook:
    return ReportBook(frozenset(range(ranks)), after)


def ranks_of(ready: CompleteCheckpoint) -> list[int]:
    return [rank for rank, _ in ready.parts]


def test_a_checkpoint_is_complete_when_every_rank_has_brought_its_part() -> None:
    reports = book()
    assert reports.reported(0, 1, (), (part(1),)) == Settled()
    assert reports.behind(1) == [1]
    (ready,) = reports.reported(1, 1, (), (part(1),)).ready
    assert (ready.index, ready.folder, ranks_of(ready)) == (1, "k1", [0, 1])


def test_a_rank_that_passes_a_report_without_a_part_has_nothing_to_add() -> None:
    reports = book()
    reports.reported(0, 1, (), (part(1),))
    (ready,) = reports.reported(1, 2, (), ()).ready
    assert ranks_of(ready) == [0]


def test_a_rank_that_returned_has_nothing_to_add() -> None:
    reports = book()
    reports.reported(0, 1, (), (part(1),))
    (ready,) = reports.returned(1).ready
    assert ranks_of(ready) == [0]


def test_a_rank_that_returned_with_an_upload_on_its_way_is_waited_for() -> None:
    reports = book()
    reports.reported(0, 1, (), (part(1),))
    reports.reported(1, 1, (1,), ())
    assert reports.returned(1) == Settled()
    assert reports.uploading() == {1}
    assert len(reports.reported(1, 1, (), (part(1),)).ready) == 1


def test_an_upload_of_a_checkpoint_that_another_rank_has_not_reached_needs_more_than_time() -> None:
    reports = book()
    reports.reported(0, 1, (1,), ())
    assert reports.uploading() == frozenset()


def test_later_checkpoints_do_not_wait_for_earlier_ones() -> None:
    reports = book(1)
    reports.reported(0, 1, (1,), ())
    assert [r.index for r in reports.reported(0, 2, (), (part(2),)).ready] == [2]
    assert [r.index for r in reports.reported(0, 2, (), (part(1),)).ready] == [1]


def test_a_checkpoint_that_lacks_a_part_is_garbage_once_nobody_adds_to_it_any_more() -> None:
    reports = book()
    assert reports.upload_failed(0, 1) == Settled()
    reports.reported(0, 1, (), ())
    assert reports.reported(1, 1, (1,), ()) == Settled()
    assert reports.reported(1, 1, (), (part(1),)) == Settled(garbage=("k1",))
    assert reports.open_folders == {}


def test_a_part_that_is_uploaded_before_its_rank_announces_it_is_not_waited_for() -> None:
    reports = ReportBook(frozenset({0, 1}))
    reports.reported(0, 1, (), (part(1),))
    assert reports.reported(1, 0, (), (part(1),)) == Settled()
    assert [r.index for r in reports.reported(1, 1, (1,), ()).ready] == [1]
    assert reports.waiting == {}
    reports.reported(0, 2, (2,), ())
    assert reports.waiting == {2: ""}


def test_an_upload_that_fails_before_its_rank_announces_it_is_not_waited_for() -> None:
    reports = ReportBook(frozenset({0, 1}))
    reports.reported(0, 1, (), (part(1),))
    reports.upload_failed(1, 1)
    assert reports.reported(1, 1, (1,), ()) == Settled(garbage=("k1",))
    assert reports.waiting == {}


def test_a_part_that_is_told_twice_counts_once() -> None:
    reports = book(1)
    assert len(reports.reported(0, 1, (), (part(1),)).ready) == 1
    assert reports.reported(0, 1, (), (part(1),)) == Settled()
    assert reports.reported(0, 1, (1,), ()) == Settled()
    assert reports.uploading() == frozenset()


def test_what_a_lost_host_owed_never_comes() -> None:
    reports = book()
    reports.reported(0, 1, (), (part(1),))
    reports.reported(1, 1, (1,), ())
    assert reports.host_lost(frozenset({1})) == Settled(garbage=("k1",))


def test_what_an_earlier_driver_dealt_with_is_not_dealt_with_again() -> None:
    reports = book(1, after=3)
    ready = reports.reported(0, 5, (), (part(3), part(4), part(5))).ready
    assert [r.index for r in ready] == [4, 5]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, dict[int, dict[int, str]], list[tuple[int, int, str]]]:
    """Ranks, what each brings at each index, and the messages about that: in order for each rank."""
    ranks = draw(st.integers(1, 3))
    last = draw(st.integers(1, 4))
    kinds = st.sampled_from(("sync", "late", "fails", "nothing"))
    brings = {rank: {k: draw(kinds) for k in range(1, last + 1)} for rank in range(ranks)}
    queues = []
    for rank in range(ranks):
        said = [(rank, k, "report") for k in range(1, last + 1)]
        late = [(rank, k, "upload") for k in range(1, last + 1) if brings[rank][k] in ("late", "fails")]
        queue = list(said)
        for message in draw(st.permutations(late)):
            earliest = queue.index((rank, message[1], "report")) + 1
            queue.insert(draw(st.integers(earliest, len(queue))), message)
        queues.append(queue)
    order = draw(st.permutations([rank for rank, queue in enumerate(queues) for _ in queue]))
    return ranks, brings, [queues[rank].pop(0) for rank in order]


@given(histories())
def test_every_order_commits_exactly_the_checkpoints_that_are_whole(
    history: tuple[int, dict[int, dict[int, str]], list[tuple[int, int, str]]],
) -> None:
    ranks, brings, messages = history
    reports = book(ranks)
    ready: dict[int, list[int]] = {}
    garbage: list[str] = []
    for rank, index, what in messages:
        kind = brings[rank][index]
        if what == "report":
            owed = (index,) if kind in ("late", "fails") else ()
            settled = reports.reported(rank, index, owed, (part(index),) if kind == "sync" else ())
        elif kind == "late":
            settled = reports.reported(rank, 0, (), (part(index),))
        else:
            settled = reports.upload_failed(rank, index)
        for done in settled.ready:
            assert done.index not in ready
            ready[done.index] = ranks_of(done)
        garbage += settled.garbage
    for index in brings[0]:
        kinds = {rank: brings[rank][index] for rank in range(ranks)}
        brought = [rank for rank, kind in kinds.items() if kind in ("sync", "late")]
        if "fails" in kinds.values():
            assert index not in ready
            assert (f"k{index}" in garbage) == bool(brought)
        else:
            assert ready.get(index, []) == brought
    assert reports.open_folders == {}
    assert reports.uploading() == frozenset()


# ---------------------------------------------------------------------- which is the newest


def ref(folder: str, index: int, *, epoch: int = 1, group: int = 0, generation: int = 0) -> CheckpointRef:
    return CheckpointRef(folder, epoch, index, group, generation)


def newest_of(*refs: CheckpointRef, committed: tuple[str, ...]) -> str | None:
    checkpoints = Checkpoints()
    for begun in refs:
        checkpoints.begin(begun)
    for folder in committed:
        checkpoints.committed(folder)
    return checkpoints.newest.folder if checkpoints.newest else None


@pytest.mark.parametrize("committed", [("one", "two"), ("two", "one")])
def test_within_a_group_the_higher_index_is_newer_in_whatever_order_commits_are_answered(
    committed: tuple[str, ...],
) -> None:
    assert newest_of(ref("one", 1), ref("two", 2), committed=committed) == "two"
    assert newest_of(ref("two", 2), ref("one", 1), committed=committed) == "two"


def test_a_replaced_group_counts_from_one_again_and_is_newer_all_the_same() -> None:
    refs = (ref("old", 60), ref("new", 1, generation=1))
    assert newest_of(*refs, committed=("old", "new")) == "new"


def test_between_groups_the_one_that_was_complete_later_is_newer() -> None:
    refs = (ref("slow", 12, group=1), ref("quick", 50, group=0))
    assert newest_of(*refs, committed=("quick", "slow")) == "quick"


def test_a_later_epoch_is_newer() -> None:
    assert newest_of(ref("a", 9), ref("b", 1, epoch=2), committed=("b", "a")) == "b"


def test_a_commit_that_failed_is_not_the_newest() -> None:
    checkpoints = Checkpoints((ref("old", 1),))
    checkpoints.begin(ref("new", 2))
    assert checkpoints.failed("new")
    assert not checkpoints.under_way()
    assert checkpoints.newest is not None
    assert checkpoints.newest.folder == "old"


def test_a_later_driver_agrees_on_the_newest_though_commits_ended_late_and_others_were_let_go() -> None:
    live = Checkpoints()
    slow = live.begin(ref("slow", 1, group=1))
    for index in (2, 3):
        live.begin(ref(f"quick{index}", index, group=1))
    last = live.begin(ref("last", 3, group=0))
    for folder in ("quick2", "quick3", "last", "slow"):
        live.committed(folder)
    for folder in ("quick2", "quick3"):
        live.forget(folder)
    assert live.newest == last
    assert Checkpoints((last, slow)).newest == last


def test_an_upload_that_ends_late_is_no_newer_than_what_was_reported_after_it_and_let_go_since() -> None:
    live = Checkpoints()
    early, late = live.begin(ref("early", 2, group=2)), ref("late", 1, group=2)
    live.committed("early")
    other = live.begin(ref("other", 1, group=0))
    live.committed("other")
    live.forget("early")
    late = live.begin(late)
    live.committed("late")
    assert live.newest == other
    assert Checkpoints((other, late), let_go=(early,)).newest == other


def test_what_an_incarnation_has_committed_is_known_also_once_it_was_let_go() -> None:
    gone = ref("gone", 7, group=2)
    checkpoints = Checkpoints((ref("kept", 3, group=1),), let_go=(gone,))
    assert checkpoints.highest(Incarnation(1, 2, 0)) == 7
    assert checkpoints.newest is not None
    assert checkpoints.newest.folder == "kept"


def test_when_the_newest_is_damaged_the_next_is_whichever_is_left_also_one_that_never_was_the_newest() -> (
    None
):
    checkpoints = Checkpoints()
    for begun in (ref("late", 1), ref("first", 2), ref("second", 3)):
        checkpoints.begin(begun)
    for folder in ("first", "second", "late"):
        checkpoints.committed(folder)
    checkpoints.forget("first")
    checkpoints.forget("second")
    assert checkpoints.newest is not None
    assert checkpoints.newest.folder == "late"


def test_a_part_that_failed_is_awaited_until_nobody_can_add_to_its_checkpoint() -> None:
    book = ReportBook(frozenset({0, 1}))
    book.reported(0, 1, (1,), ())
    book.reported(1, 1, (1,), ())
    book.upload_failed(1, 1)
    assert book.awaited(1) == {1}
    book.upload_failed(0, 1)
    assert book.awaited(1) == set()
