"""Which sample is the i-th is arithmetic: a permutation, always the same one, and a good one."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from everstep.data import order
from everstep.data.order import Permutation, folded


@given(length=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(0, 10**6))
@settings(max_examples=60)
def test_every_sample_comes_exactly_once(length, seed, epoch):
    assert sorted(Permutation(length, seed, epoch).take(range(length))) == list(range(length))


@given(length=st.integers(1, order.MAX_LENGTH), seed=st.integers(0, 2**63 - 1), data=st.data())
@settings(max_examples=60)
def test_numpy_and_plain_python_agree_bit_for_bit(length, seed, data):
    permutation = Permutation(length, seed, 0)
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=30, max_size=40))
    assert permutation.take(indices) == [permutation[index] for index in indices]


def test_without_numpy_the_order_is_the_same(monkeypatch):
    with_numpy = Permutation(1000, 3, 1).take(range(1000))
    monkeypatch.setattr(order, "numpy_here", lambda: None)
    assert Permutation(1000, 3, 1).take(range(1000)) == with_numpy


def test_the_order_never_changes_between_versions():
    """Other numbers here mean that no saved run can be resumed: raise the version in the keys."""
    assert Permutation(10, 0, 0).take(range(10)) == [2, 9, 1, 8, 4, 6, 3, 0, 7, 5]
    assert [Permutation(10**9, 0, 0)[index] for index in (0, 1, 10**9 - 1)] == [
        113668986,
        179274816,
        451615218,
    ]
    assert folded(0, 0, 0) == 4393872577207653225


def test_an_index_outside_of_the_source_is_refused():
    with pytest.raises(IndexError):
        Permutation(5, 0, 0)[5]


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_equally_likely(length):
    draws = 20 * math.factorial(length)
    seen = Counter(tuple(Permutation(length, seed, 0).take(range(length))) for seed in range(draws))
    counts = [seen[each] for each in itertools.permutations(range(length))]
    assert p_value(counts) > 1e-4


@pytest.mark.parametrize("length", [91, 70_001])
def test_a_sample_may_be_anywhere_and_next_to_anything(length):
    drawn = [Permutation(length, seed, 5).take(range(60)) for seed in range(600)]
    for position in (0, 1, 59):
        where = Counter(taken[position] * 13 // length for taken in drawn)
        assert p_value([where[part] for part in range(13)]) > 1e-4
    distances = Counter(
        ((after - before) % length - 1) * 30 // (length - 1)
        for taken in drawn
        for before, after in itertools.pairwise(taken)
    )
    assert p_value([distances[part] for part in range(30)]) > 1e-4


def test_passes_and_seeds_have_orders_of_their_own():
    orders = [
        tuple(Permutation(50, seed, epoch).take(range(50))) for seed in range(10) for epoch in range(10)
    ]
    assert len(set(orders)) == 100
    agreements = sum(a == b for x, y in itertools.combinations(orders, 2) for a, b in zip(x, y, strict=True))
    assert 4500 < agreements < 5400  # 4,950 pairs, which agree once on average


def test_seeds_of_samples_differ_and_fit_every_framework():
    seeds = {folded(seed, epoch, number) for seed in (0, 1) for epoch in (0, 1) for number in range(5000)}
    assert len(seeds) == 20_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def p_value(counts: list[int]) -> float:
    """That counts of things which are equally likely differ as much as these."""
    from scipy.stats import chisquare

    return float(chisquare(counts).pvalue)
