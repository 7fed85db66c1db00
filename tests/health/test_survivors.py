"""Which workers of an earlier driver are kept."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from hypothesis import given, strategies as st

from everstep.health.survivors import LeftWorker, Survivors, Unfit, choose, slices_to_restore
from everstep.topology.placement import Assignment, Placement, assign_ranks
from everstep.topology.slices import HostView, Slice

LAST = 3


def places_on(slices: int, hosts: int, slots: int, group_size: int | None) -> tuple[Assignment, ...]:
    """Every slot has a worker; hosts are called ``s0/0``, ``s0/1``, …"""
    names = [f"s{number}" for number in range(slices)]
    found = tuple(
        Slice(name, tuple(HostView(f"{name}/{index}", name, index, slots, hosts) for index in range(hosts)))
        for name in names
    )
    workers = tuple((host.id, slots) for one in found for host in one.hosts)
    return assign_ranks(Placement(found, workers), group_size)


def left_at(place: Assignment, epoch: int = LAST, generation: int = 0, joined: bool = True) -> LeftWorker:
    return LeftWorker(place.host, epoch, generation, place, joined)


def left_on(places: Iterable[Assignment], epoch: int = LAST) -> list[LeftWorker]:
    return [left_at(place, epoch) for place in places]


@st.composite
def every_place(draw: st.DrawFn) -> tuple[Assignment, ...]:
    slices, hosts, slots = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)))
    world = slices * hosts * slots
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    return places_on(slices, hosts, slots, draw(st.none() | st.sampled_from(sizes)))


class Found(msgspec.Struct, frozen=True):
    """What a new driver finds, and what it makes of that."""

    places: tuple[Assignment, ...]
    """Where workers of the newest attempt that is left were placed."""
    left: list[LeftWorker]
    silent: set[str]
    last_epoch: int
    begun: dict[tuple[int, int], int]
    chosen: Survivors


@st.composite
def takeovers(draw: st.DrawFn) -> Found:
    places = draw(every_place())
    silent = {host for host in {place.host: None for place in places} if draw(_seldom())}
    left = []
    generations = draw(st.sampled_from([st.just(0), st.just(2), st.sampled_from([0, 2])]))
    for place in places:
        if place.host in silent or draw(_seldom()):
            continue
        told, returned = draw(st.sampled_from([(False, False)] * 8 + [(True, False), (True, True)]))
        generation, joined = draw(generations), not draw(_seldom())
        left.append(LeftWorker(place.host, LAST, generation, place, joined, told, returned))
    newest = {worker.rank: worker.generation for worker in left}
    for place in draw(st.lists(st.sampled_from(places), max_size=3)):
        if place.host not in silent:
            left.append(left_at(place, epoch=LAST - 1))
            if newest.get(place.rank, 0) > 0:
                left.append(left_at(place, generation=1))
    left = list(draw(st.permutations(left)))
    last_epoch = LAST + draw(st.sampled_from([0, 0, 0, 1]))
    groups = st.integers(0, places[0].num_groups - 1)
    numbers = st.tuples(st.sampled_from([LAST - 1, LAST]), groups)
    begun = draw(st.dictionaries(numbers, st.sampled_from([1, 2, 3]), max_size=2))
    return Found(places, left, silent, last_epoch, begun, choose(left, last_epoch, begun, silent))


def _seldom() -> st.SearchStrategy[bool]:
    return st.sampled_from([False] * 7 + [True])


# ---------------------------------------------------------------------- whatever is found


@given(takeovers())
def test_a_group_that_is_kept_is_whole_joined_and_of_the_last_attempt(found: Found) -> None:
    kept = {worker.rank for worker in found.chosen.kept}
    for worker in found.chosen.kept:
        first = worker.place.group_id * worker.place.group_size
        assert {*range(first, first + worker.place.group_size)} <= kept
        assert worker.has_joined
        assert worker.epoch == found.chosen.epoch == found.last_epoch
        assert worker.has_returned or not worker.was_told_to_end
        assert worker.generation == max(
            other.generation
            for other in found.left
            if (other.epoch, other.place.group_id) == (worker.epoch, worker.place.group_id)
        )
        assert worker.generation >= found.begun.get((worker.epoch, worker.place.group_id), 0)


@given(takeovers())
def test_whoever_is_left_is_kept_or_ended_and_every_incarnation_that_was_begun_is_known(found: Found) -> None:
    chosen = found.chosen
    assert {*chosen.kept, *chosen.ended, *chosen.superseded} == {*found.left}
    assert {*chosen.superseded}.isdisjoint(chosen.everybody)
    generations = dict(chosen.generations)
    for worker in chosen.everybody:
        group = worker.place.group_id
        assert generations[group] >= max(worker.generation, found.begun.get((worker.epoch, group), 0))
    for worker in chosen.kept:
        assert generations[worker.place.group_id] == worker.generation


@given(takeovers())
def test_no_slice_and_no_host_is_kept_in_part(found: Found) -> None:
    kept = {worker.rank for worker in found.chosen.kept}
    used = {worker.place.slice for worker in found.chosen.kept}
    assert {place.rank for place in found.places if place.slice in used} == kept
    assert found.chosen.kept_hosts.isdisjoint(worker.host for worker in found.chosen.ended)


@given(takeovers())
def test_without_replica_groups_all_are_kept_or_none(found: Found) -> None:
    if found.places[0].num_groups == 1:
        assert len(found.chosen.kept) in (0, len(found.places))


@given(takeovers())
def test_no_group_with_a_worker_on_a_host_that_did_not_answer_is_kept(found: Found) -> None:
    out = {place.group_id for place in found.places if place.host in found.silent}
    assert out.isdisjoint(worker.place.group_id for worker in found.chosen.kept)
    assert found.chosen.unanswered == tuple(sorted(found.silent))


@given(takeovers())
def test_each_rank_of_the_newest_attempt_is_kept_or_ended_and_there_is_a_reason_for_those_that_end(
    found: Found,
) -> None:
    chosen = found.chosen
    newest = max((worker.epoch for worker in found.left), default=0)
    ranks = sorted({worker.rank for worker in found.left if worker.epoch == newest})
    assert [worker.rank for worker in chosen.everybody] == ranks
    assert chosen.kept == tuple(sorted(chosen.kept, key=lambda worker: worker.rank))
    assert not (chosen.ended and not chosen.unfit)
    unfit = {rank for _, ranks in chosen.unfit for rank in ranks}
    assert unfit.isdisjoint(worker.rank for worker in chosen.kept)


@given(takeovers())
def test_a_group_with_nothing_amiss_in_any_slice_that_it_shares_is_kept(found: Found) -> None:
    """Groups are ended for a reason that touches them, never for one elsewhere."""
    chosen = found.chosen
    size = found.places[0].group_size
    amiss = {rank // size for _, ranks in chosen.unfit for rank in ranks}
    slices = {place.slice for place in found.places if place.group_id in amiss}
    touched = amiss
    while more := {place.group_id for place in found.places if place.slice in slices} - touched:
        touched |= more
        slices |= {place.slice for place in found.places if place.group_id in touched}
    assert {worker.place.group_id for worker in chosen.ended} <= touched


@given(takeovers(), st.data())
def test_it_does_not_matter_who_tells_first(found: Found, data: st.DataObject) -> None:
    again = data.draw(st.permutations(found.left))
    assert choose(again, found.last_epoch, found.begun, found.silent) == found.chosen


@given(takeovers(), st.sets(st.integers(0, 5)), st.booleans(), st.booleans())
def test_memory_is_restored_from_whole_slices_of_hosts_that_answered_and_have_no_worker_left(
    found: Found, others: set[int], ending: bool, empty: bool
) -> None:
    asked = {place.host for place in found.places}
    slice_of = {place.host: place.slice for place in found.places} | {
        f"other {number}": f"s{number}" for number in others
    }
    slices = slices_to_restore(
        found.chosen,
        asked,
        slice_of,
        with_snapshots=set() if empty else asked,
        still_ending=asked if ending else set(),
    )
    spoilt = {f"s{number}" for number in others} | {slice_of[host] for host in found.silent}
    none = found.chosen.kept or ending or empty
    assert slices == (() if none else tuple(sorted({slice_of[host] for host in asked} - spoilt)))


# ---------------------------------------------------------------------- case by case


def test_workers_of_the_last_attempt_that_all_train_are_kept() -> None:
    chosen = choose(left_on(places_on(2, 1, 1, None)), LAST, {}, ())
    assert [worker.rank for worker in chosen.kept] == [0, 1]
    assert (chosen.epoch, chosen.ended, chosen.unfit) == (LAST, (), ())


def test_none_is_kept_where_one_is_gone() -> None:
    chosen = choose(left_on(places_on(2, 1, 1, None)[:1]), LAST, {}, ())
    assert chosen.kept == ()
    assert chosen.unfit == ((Unfit.GONE, (1,)),)


def test_none_is_kept_of_an_attempt_after_which_another_was_begun() -> None:
    chosen = choose(left_on(places_on(2, 1, 1, None)), LAST + 1, {}, ())
    assert chosen.unfit == ((Unfit.OVER, (0, 1)),)
    assert [worker.rank for worker in chosen.ended] == [0, 1]


def test_a_group_that_is_whole_is_not_kept_where_its_slice_has_lost_a_host() -> None:
    """Four groups of one worker each, in slices of two hosts. The agent of rank 2 is frozen."""
    places = places_on(2, 2, 1, 1)
    chosen = choose(left_on(place for place in places if place.rank != 2), LAST, {}, ["s1/0"])
    assert chosen.unfit == ((Unfit.GONE, (2,)),)
    assert chosen.kept_hosts == {"s0/0", "s0/1"}
    assert [worker.rank for worker in chosen.ended] == [3], (
        "both groups move together, and fill another slice"
    )


def test_a_worker_that_was_told_to_end_is_kept_only_if_it_has_returned() -> None:
    first, second = left_on(places_on(2, 1, 1, 1))
    told = msgspec.structs.replace(first, was_told_to_end=True)
    assert choose([told, second], LAST, {}, ()).kept == (second,)
    returned = msgspec.structs.replace(told, has_returned=True)
    assert choose([returned, second], LAST, {}, ()).kept == (returned, second)


def test_a_worker_that_was_told_to_end_before_it_joined_is_named_once() -> None:
    first, second = left_on(places_on(2, 1, 1, 1))
    told = msgspec.structs.replace(first, was_told_to_end=True, has_joined=False)
    assert choose([told, second], LAST, {}, ()).unfit == ((Unfit.TOLD_TO_END, (0,)),)


def test_groups_that_share_slices_one_after_the_other_end_together() -> None:
    """Groups of three on slices of two hosts: ranks 0-2 and 3-5 share the second slice."""
    places = places_on(3, 2, 1, 3)
    assert choose(left_on(places[1:]), LAST, {}, ()).kept == ()


def test_what_is_left_of_an_older_attempt_does_not_count() -> None:
    places = places_on(2, 1, 1, None)
    old = left_on(places, LAST - 1)
    chosen = choose([*old, left_at(places[0])], LAST, {}, ())
    assert chosen.epoch == LAST
    assert chosen.unfit == ((Unfit.GONE, (1,)),)
    assert chosen.superseded == tuple(old), "they end as well"


def test_ranks_of_two_incarnations_are_no_group() -> None:
    """A host that was lost is back with rank 0; the one with its replacement is silent."""
    first, second, *others = places_on(4, 1, 1, 2)
    left = [left_at(first), left_at(second, generation=1), *left_on(others)]
    for begun in ({}, {(LAST, 0): 1}):
        chosen = choose(left, LAST, begun, ())
        assert [worker.rank for worker in chosen.kept] == [2, 3]
        assert [worker.rank for worker in chosen.ended] == [0, 1]
        assert chosen.unfit == ((Unfit.REPLACED, (0,)),)
        assert dict(chosen.generations)[0] == 1


def test_a_group_is_not_kept_if_a_later_incarnation_of_it_was_begun() -> None:
    first, second = left_on(places_on(2, 1, 1, 1))
    chosen = choose([first, second], LAST, {(LAST, 0): 1, (LAST - 1, 1): 4}, ["replacement"])
    assert chosen.kept == (second,)
    assert chosen.ended == (first,)
    assert chosen.unfit == ((Unfit.REPLACED, (0,)),)
    assert chosen.generations == ((0, 1), (1, 0)), "so that its number isn't used twice"


def test_the_last_incarnation_is_kept_and_what_is_left_of_the_one_before_ends() -> None:
    first, second = places_on(2, 1, 1, 1)
    old, new = left_at(first), left_at(msgspec.structs.replace(first, host="other"), generation=1)
    chosen = choose([old, new, left_at(second)], LAST, {(LAST, 0): 1}, ())
    assert [worker.generation for worker in chosen.kept] == [1, 0]
    assert (chosen.ended, chosen.superseded, chosen.unfit) == ((), (old,), ())


def test_where_nobody_is_left_nobody_is_kept_or_ended() -> None:
    assert choose([], LAST, {}, ["b", "a"]) == Survivors(unanswered=("a", "b"))
