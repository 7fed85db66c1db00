"""What a run's function returned, of all that its ranks say."""

from __future__ import annotations

import cloudpickle
import pytest

from everstep.driver.workers import Results
from everstep.protocol.worker_messages import Returned

NOTHING = Returned(None)
UNSENT = Returned(None, "it can't be pickled: TypeError: a lock")


def value(of: object) -> Returned:
    return Returned(cloudpickle.dumps(of))


@pytest.mark.parametrize(
    ("said", "had", "problem"),
    [
        ([(0, value(7)), (1, NOTHING)], 7, ""),
        ([(1, NOTHING), (0, value(7))], 7, ""),
        ([(0, UNSENT), (1, NOTHING)], None, UNSENT.problem),
        ([(1, NOTHING), (0, UNSENT), (2, NOTHING)], None, UNSENT.problem),
        ([(4, value(4)), (0, value(7))], 7, ""),
        ([(4, UNSENT), (0, value(7)), (1, NOTHING)], 7, ""),
        ([(4, UNSENT), (8, value(8))], 8, ""),
    ],
)
def test_rank_0s_counts_or_why_it_cant_be_had_whoever_else_returns(
    said: list[tuple[int, Returned]], had: object, problem: str
) -> None:
    results = Results()
    for rank, message in said:
        results.returned(rank, message)
    assert (results.value, results.problem) == (had, problem)
