"""A slice counts only if it is whole: every place filled by a host that is alive, free and has room."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, strategies as st

from everstep.topology.slices import HostView, describe_shortage, natural_key, whole_slices


def hosts(name: str, count: int = 2) -> list[HostView]:
    return [HostView(f"{name}.{i}", name, i, 4, count) for i in range(count)]


def changed(host: HostView, **fields: object) -> HostView:
    return msgspec.structs.replace(host, **fields)


def names(views: list[HostView]) -> list[str]:
    return [s.name for s in whole_slices(views)]


def test_slice_2_comes_before_slice_10() -> None:
    assert names(hosts("slice-10") + hosts("slice-2")) == ["slice-2", "slice-10"]


def test_a_slice_with_a_host_that_is_missing_dead_taken_or_too_small_is_not_whole() -> None:
    first, second = hosts("a")
    for other in (
        [],
        [changed(second, alive=False)],
        [changed(second, free=False)],
        [changed(second, slots=0)],
    ):
        assert names([first, *other]) == []
    assert names([first, second]) == ["a"]


def test_four_slices_with_one_dead_host_each_are_no_slice_however_many_hosts_live() -> None:
    views = [changed(h, alive=h.index > 0) for name in "abcd" for h in hosts(name, 4)]
    assert len([h for h in views if h.alive]) == 12
    assert names(views) == []


def test_two_hosts_with_the_same_index_do_not_make_a_slice() -> None:
    first, second = hosts("a")
    assert names([first, changed(second, index=0)]) == []


def test_a_dead_host_beside_the_one_that_took_its_place_does_no_harm() -> None:
    first, second = hosts("a")
    replaced = [first, changed(second, alive=False), changed(second, id="new")]
    assert [h.id for h in whole_slices(replaced)[0].hosts] == ["a.0", "new"]


def test_hosts_are_in_the_order_of_their_index_whatever_the_order_of_the_list() -> None:
    views = hosts("a", 12)
    random.Random(1).shuffle(views)
    assert [h.index for h in whole_slices(views)[0].hosts] == list(range(12))


def test_the_shortage_names_what_is_missing_and_where() -> None:
    first, second = hosts("a")
    text = describe_shortage(
        [first, changed(second, alive=False), *hosts("b"), changed(hosts("c")[0], free=False)]
    )
    assert "a: not whole (1 of 2 hosts there; lost: a.1)" in text
    assert text.startswith("1 whole slice is free, with room for 8; a: ")
    assert "c: not whole (1 of 2 hosts there; in use by others: c.0)" in text
    assert describe_shortage([]) == "no host is known"
    assert describe_shortage(hosts("b"), {"b"}) == "no other host is known"
    many = [changed(host, alive=False) for i in range(1000) for host in hosts(f"s{i}")]
    assert describe_shortage(many).endswith("; and 992 more that are not whole")


@given(st.text(max_size=12), st.text(max_size=12))
def test_every_two_names_can_be_ordered_and_only_equal_ones_are_equal(one: str, other: str) -> None:
    assert (natural_key(one) == natural_key(other)) == (one == other)
    assert (natural_key(one) < natural_key(other)) != (natural_key(other) < natural_key(one)) or one == other


@given(st.text(alphabet="ab-", max_size=4), st.integers(0, 10**6), st.integers(0, 10**6))
def test_numbers_in_names_count_as_numbers(prefix: str, one: int, other: int) -> None:
    assert (natural_key(f"{prefix}{one}") < natural_key(f"{prefix}{other}")) == (one < other)
