"""What is told of slow ranks, and to whom they are compared."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.driver.stragglers import StragglerWatch
from everstep.health.stragglers import Pace, Slowness, Straggler
from everstep.journal.history import History
from everstep.journal.records import StragglerSeen, decode, encode
from everstep.topology.placement import Assignment


def ranks(count: int, group_size: int | None = None) -> list[Assignment]:
    size = group_size or count
    return [
        Assignment(
            rank=rank,
            host=f"host-{rank}",
            local_rank=0,
            local_world_size=1,
            node_rank=rank,
            num_nodes=count,
            world_size=count,
            slice="slice-0",
            slice_id=0,
            num_slices=1,
            group_id=rank // size,
            num_groups=count // size,
            group_rank=rank % size,
            group_size=size,
        )
        for rank in range(count)
    ]


class Watched:
    def __init__(self, everybody: Sequence[Assignment]) -> None:
        self.told: list[StragglerSeen] = []
        self.everybody = everybody
        self.watch = StragglerWatch(self.told.append)
        self.at = {a.rank: 0 for a in everybody}
        self.watch.begin(1, everybody, {a.rank for a in everybody}, 0.0)

    def steps(self, count: int, slow: int = -1) -> None:
        for _ in range(count):
            for a in self.everybody:
                self.at[a.rank] += 1
                pace = Pace(1.5, 1.5 if a.rank == slow else 1.0, 0.0, 0.0, 0.0, True)
                self.watch.paced(a.rank, self.at[a.rank], pace, 10.0)

    def said(self) -> list[tuple[tuple[int, ...], str]]:
        return [(one.ranks, one.over) for one in self.told]


def test_a_slow_rank_is_told_once_with_its_host_and_once_more_when_it_is_over() -> None:
    run = Watched(ranks(3))
    run.steps(60, slow=1)
    (told,) = run.told
    assert (told.ranks, told.host, told.kind) == ((1,), "host-1", Slowness.COMPUTING)
    assert run.watch.note_of(1) == "50 % slower than its peers: computing"
    assert run.watch.note_of(0) == ""
    run.steps(60)
    assert run.said() == [((1,), ""), ((1,), "recovered")]
    assert run.watch.note_of(1) == ""


def test_a_restart_ends_it_and_the_next_attempt_is_looked_at_anew() -> None:
    run = Watched(ranks(3))
    run.steps(40, slow=1)
    run.watch.begin(2, run.everybody, {0, 1, 2}, 20.0)
    assert run.said() == [((1,), ""), ((1,), "restarted")]
    run.steps(40, slow=1)
    assert [one.epoch for one in run.told] == [1, 1, 2]


def test_ranks_are_compared_within_their_replica_group() -> None:
    run = Watched(ranks(4, group_size=2))
    run.steps(40, slow=3)
    assert run.said() == [((3,), "")]
    run.watch.begin(1, run.everybody, {0, 1}, 20.0)  # the other group is replaced
    run.steps(40, slow=3)
    assert run.said() == [((3,), "")]


def test_groups_of_one_rank_are_compared_with_each_other_wherever_their_counts_are() -> None:
    run = Watched(ranks(3, group_size=1))
    run.at[2] = 700  # reports so far
    run.steps(40, slow=2)
    assert run.said() == [((2,), "")]
    run.watch.begin(1, run.everybody, {0}, 20.0)
    run.steps(60)
    assert run.said() == [((2,), ""), ((2,), "recovered")]


def test_the_next_driver_knows_whom_the_last_has_named() -> None:
    first = Watched(ranks(3))
    first.steps(40, slow=1)
    history = History.of(record for told in first.told for record in decode(encode(told)))
    named = [Straggler(one.ranks, one.kind, one.slower) for one in history.slow(1)]
    second = Watched(ranks(3))
    second.watch = StragglerWatch(second.told.append)
    second.watch.begin(1, second.everybody, set(), 0.0, named)
    second.steps(40, slow=1)
    assert second.told == []
    second.steps(60)
    assert second.said() == [((1,), "recovered")]
    for told in second.told:
        history.apply(told)
    assert history.slow(1) == []


def test_who_was_slow_in_an_earlier_attempt_is_not_slow_now() -> None:
    history = History()
    history.apply(StragglerSeen(1.0, 1, (0,), "host-0", Slowness.DATA, 0.3))
    assert history.slow(2) == []
    history.apply(StragglerSeen(2.0, 2, (1,), "host-1", Slowness.DATA, 0.3))
    assert [one.ranks for one in history.stragglers.values()] == [(1,)]
