"""Which hosts a worker group gets, for clusters of every shape."""

from __future__ import annotations

import itertools

from hands import views
from hypothesis import given, strategies as st

from everstep.topology.placement import Placement, assign_ranks, groups_nowhere, move_slices, plan
from everstep.topology.slices import HostView, natural_key, whole_slices


@st.composite
def clusters(draw: st.DrawFn) -> list[HostView]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        size = draw(st.integers(1, 3))
        slots = draw(st.integers(0, 3))
        for index in range(size):
            alive, free = draw(
                st.sampled_from(((True, True), (True, True), (True, True), (False, True), (True, False)))
            )
            found.append(HostView(f"s{number}.{index}", f"s{number}", index, slots, size, alive, free))
    return draw(st.permutations(found))


sizes = st.integers(1, 12)


@given(clusters(), sizes, sizes, st.integers(1, 3), st.booleans())
def test_a_placement_takes_whole_slices_and_keeps_to_the_numbers(
    hosts: list[HostView], low: int, high: int, multiple: int, spread: bool
) -> None:
    found = plan(
        whole_slices(hosts),
        at_least=min(low, high),
        at_most=max(low, high),
        multiple_of=multiple,
        spread=spread,
    )
    if found is None:
        return
    assert min(low, high) <= found.world_size <= max(low, high)
    assert found.world_size % multiple == 0
    counts = dict(found.workers)
    whole = {s.name: s for s in whole_slices(hosts)}
    for piece in found.slices:
        assert piece == whole[piece.name]
        if len(piece.hosts) > 1:
            assert all(counts[host.id] == host.slots for host in piece.hosts), "a wired slice is used wholly"
        else:
            assert 0 < counts[piece.hosts[0].id] <= piece.hosts[0].slots
    assert set(counts) == {host.id for piece in found.slices for host in piece.hosts}


@given(clusters(), st.integers(1, 12), st.integers(1, 3))
def test_no_larger_placement_exists(hosts: list[HostView], at_most: int, multiple: int) -> None:
    found = plan(whole_slices(hosts), at_least=1, at_most=at_most, multiple_of=multiple)
    whole = whole_slices(hosts)
    wired = [s.slots for s in whole if not s.divisible]
    lone = sum(s.slots for s in whole if s.divisible)
    possible = {
        total
        for n in range(len(wired) + 1)
        for chosen in itertools.combinations(wired, n)
        for total in range(sum(chosen), sum(chosen) + lone + 1)
        if 0 < total <= at_most and total % multiple == 0
    }
    assert (found.world_size if found else 0) == max(possible, default=0)


@given(clusters(), st.integers(1, 12))
def test_ranks_are_dense_and_in_topology_order(hosts: list[HostView], at_most: int) -> None:
    found = plan(whole_slices(hosts), at_least=1, at_most=at_most)
    if found is None:
        return
    places = assign_ranks(found, None)
    index = {host.id: host.index for host in hosts}
    assert [a.rank for a in places] == list(range(found.world_size))
    order = [(natural_key(a.slice), index[a.host], a.local_rank) for a in places]
    assert order == sorted(order)
    assert [a.slice_id for a in places] == sorted(a.slice_id for a in places)
    assert {a.slice_id for a in places} == set(range(len(found.slices)))
    assert {a.node_rank for a in places} == set(range(places[0].num_nodes))
    assert {(a.world_size, a.num_slices, a.num_groups) for a in places} == {
        (found.world_size, len(found.slices), 1)
    }


@given(clusters(), st.integers(1, 12), st.integers(1, 3))
def test_replica_groups_are_runs_of_consecutive_ranks(hosts: list[HostView], at_most: int, size: int) -> None:
    found = plan(whole_slices(hosts), at_least=1, at_most=at_most, multiple_of=size)
    if found is None:
        return
    places = assign_ranks(found, size)
    assert [(a.group_id, a.group_rank) for a in places] == [divmod(rank, size) for rank in range(len(places))]


def names(placement: Placement | None) -> set[str]:
    return set() if placement is None else set(placement.slice_names)


def test_what_is_held_already_comes_first() -> None:
    hosts = views("a", "b", "c", hosts=2)
    assert names(plan(whole_slices(hosts), at_least=4, at_most=4, prefer={"b", "c"})) == {"b", "c"}


def test_what_keeps_failing_is_left_out_if_the_group_is_no_smaller_for_it() -> None:
    hosts = views("a", "b", "c", hosts=2)
    assert names(plan(whole_slices(hosts), at_least=4, at_most=4, avoid={"a"})) == {"b", "c"}
    assert names(plan(whole_slices(hosts), at_least=4, at_most=6, avoid={"a"})) == {"a", "b", "c"}


def test_a_lone_host_may_be_filled_in_part_and_a_wired_slice_may_not() -> None:
    assert plan(whole_slices(views("a", slots=4)), at_least=3, at_most=3) is not None
    assert plan(whole_slices(views("a", hosts=2, slots=4)), at_least=3, at_most=3) is None


def test_workers_are_packed_unless_they_are_to_be_spread() -> None:
    hosts = views("a", "b", "c", slots=2)
    assert dict(plan(whole_slices(hosts), at_least=3, at_most=3).workers) == {"a.0": 2, "b.0": 1}  # type: ignore[union-attr]
    spread = plan(whole_slices(hosts), at_least=3, at_most=3, spread=True)
    assert spread is not None
    assert dict(spread.workers) == {"a.0": 1, "b.0": 1, "c.0": 1}


def test_slices_of_different_sizes_are_combined_so_that_most_workers_fit() -> None:
    hosts = [*views("a", hosts=4), *views("b", "c", hosts=3)]
    assert names(plan(whole_slices(hosts), at_least=6, at_most=6)) == {"b", "c"}


def test_workers_move_only_out_of_the_slice_that_is_gone() -> None:
    hosts = views("a", "b", "c", hosts=2)
    everyone = assign_ranks(plan(whole_slices(hosts), at_least=4, at_most=4), 1)  # type: ignore[arg-type]
    left = whole_slices(h for h in hosts if h.slice != "a")
    moved = move_slices(everyone, left, [s for s in left if s.name == "c"], set())
    assert [a.host for a in moved] == ["c.0", "c.1", "b.0", "b.1"]
    assert [(a.rank, a.group_id, a.slice_id) for a in moved] == [
        (a.rank, a.group_id, a.slice_id) for a in everyone
    ]


def test_workers_do_not_move_to_a_slice_of_another_shape() -> None:
    hosts = views("a", hosts=2)
    everyone = assign_ranks(plan(whole_slices(hosts), at_least=2, at_most=2), 1)  # type: ignore[arg-type]
    other = whole_slices(views("b", hosts=3))
    assert move_slices(everyone, other, other, set()) == ()


def test_who_has_to_leave_its_slice_chooses_before_who_would_rather() -> None:
    hosts = views("a", "b", "c")
    everyone = assign_ranks(plan(whole_slices(hosts), at_least=2, at_most=2), 1)  # type: ignore[arg-type]
    left = whole_slices(h for h in hosts if h.slice != "b")
    moved = move_slices(everyone, left, [s for s in left if s.name == "c"], {"a"})
    assert [a.slice for a in moved] == ["a", "c"]


def test_a_group_of_a_shared_slice_that_is_missing_alone_moves_to_a_whole_one() -> None:
    hosts = views("a", "b", "c", hosts=3)
    everyone = assign_ranks(plan(whole_slices(hosts), at_least=6, at_most=6), 1)  # type: ignore[arg-type]
    (alone,) = groups_nowhere(everyone[:5], 6)
    free = whole_slices(h for h in hosts if h.slice == "c")
    (moved,) = move_slices([alone], whole_slices(hosts), free, set())
    assert (moved.rank, moved.host) == (5, "c.0")
