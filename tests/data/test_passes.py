"""A pass over a data set is dealt to ranks without losing or doubling a sample."""

from __future__ import annotations

import pytest

from everstep.data.passes import next_shares


def passes(length: int, batch: int, ranks: int, drop_last: bool = False) -> list[list[range]]:
    found, at = [], 0
    while shares := next_shares(at, length, batch, ranks, drop_last=drop_last):
        found.append(shares)
        at = shares[-1].stop
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [1, 2, 7, 100])
@pytest.mark.parametrize("length", [8, 9, 31, 64, 100])
def test_every_sample_is_dealt_once_and_every_rank_has_as_many_batches(
    length: int, batch: int, ranks: int
) -> None:
    rounds = passes(length, batch, ranks)
    assert [n for shares in rounds for share in shares for n in share] == list(range(length))
    for shares in rounds:
        assert all(1 <= len(share) <= batch + 1 for share in shares)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_what_does_not_fill_a_batch_on_every_rank_can_be_left_out() -> None:
    assert passes(11, 2, 2, drop_last=True) == [[range(2), range(2, 4)], [range(4, 6), range(6, 8)]]


def test_a_pass_can_go_on_with_another_number_of_ranks() -> None:
    first = next_shares(0, 20, 2, 4)
    rest = next_shares(first[-1].stop, 20, 2, 3)
    assert [n for share in [*first, *rest] for n in share] == list(range(14))
