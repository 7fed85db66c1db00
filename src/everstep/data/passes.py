"""How a pass over a data set is dealt to ranks, a batch for each at a time."""

from __future__ import annotations

import itertools


def next_shares(begin: int, length: int, batch: int, ranks: int, *, drop_last: bool = False) -> list[range]:
    """Which samples of a pass each rank gets next. Nothing: the pass is over.

    All ranks get equally many batches. The samples that are left at the end are shared evenly; where not
    every rank would get one more, they are part of the batch before, of which some ranks then have one more.
    ``drop_last`` leaves out what doesn't fill a batch on every rank.

    After a resume with more ranks, fewer samples than ranks can be left. Ranks without one then get the first
    of them again: they take part in the step, and a batch can't be empty.
    """
    left = length - begin
    full = batch * ranks
    if left <= 0 or (drop_last and left < full):
        return []
    count = left if left - full < ranks and not drop_last else full
    share, more = divmod(count, ranks)
    ends = [begin]
    for rank in range(ranks):
        ends.append(ends[-1] + share + (rank < more))
    shares = [range(start, end) for start, end in itertools.pairwise(ends)]
    return [each or shares[0] for each in shares]
