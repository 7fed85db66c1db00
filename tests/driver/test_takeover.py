"""Which workers of an earlier driver are kept."""

from __future__ import annotations

from everstep.agent import wire
from everstep.backend.base import Member
from everstep.driver.takeover import LeftBehind
from everstep.topology.placement import Assignment

HOSTS = ["a", "b"]


def held(rank: int, epoch: int, stopping: bool = False) -> wire.Held:
    place = Assignment(rank, HOSTS[rank], 0, 1, rank, 2, 2, HOSTS[rank], rank, 2, 0, 1, rank, 2)
    member = Member(rank, 2, 0, 1, rank, 2, group_rank=rank, group_size=2)
    spec = wire.WorkerSpec(
        "run",
        "/runs/run",
        epoch,
        0,
        place,
        member,
        None,
        "first start",
        "",
        0,
        1.0,
        1.0,
        1.0,
        1.0,
        False,
        False,
    )
    return wire.Held(spec, 100 + rank, 0, b"", stopping)


def joined(rank: int, epoch: int) -> wire.FromWorker:
    return wire.FromWorker(epoch, 0, rank, 0, wire.frame(wire.Joined()))


def left_behind(epoch: int, last_epoch: int, *, missing: int | None = None) -> LeftBehind:
    left = LeftBehind([*HOSTS], last_epoch)
    for rank, host in enumerate(HOSTS):
        here = [] if rank == missing else [held(rank, epoch)]
        left.hear(host, wire.Inventory(here))
        if here:
            left.hear(host, joined(rank, epoch))
        left.hear(host, wire.HandedOver())
    return left


SLICES = {host: host for host in HOSTS}


def test_workers_of_the_last_epoch_that_all_train_are_kept() -> None:
    left = left_behind(3, 3)
    assert left.told()
    assert left.give_up_broken(SLICES) == ""
    assert left.kept_hosts() == {"a", "b"}
    assert [a.rank for a in left.adopted({}).assignments] == [0, 1]


def test_none_is_kept_where_one_is_gone() -> None:
    left = left_behind(3, 3, missing=1)
    assert "ranks 1 are gone" in left.give_up_broken(SLICES)
    assert left.kept_hosts() == set()


def test_none_is_kept_of_an_epoch_after_which_another_was_begun() -> None:
    left = left_behind(3, 4)
    assert "are of an epoch that was over" in left.give_up_broken(SLICES)
    assert left.kept_hosts() == set()
    assert left.broken() == {("a", 0): [0], ("b", 0): [1]}, "and they are ended"
