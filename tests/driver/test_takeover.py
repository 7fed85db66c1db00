"""Which workers of an earlier driver are kept."""

from __future__ import annotations

from everstep.backend.base import Member
from everstep.control.snapshots import Copy
from everstep.driver.takeover import LeftBehind
from everstep.protocol import framing, wire, words
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
    return wire.FromWorker(epoch, 0, rank, 0, framing.frame(words.Joined()))


def left_behind(
    epoch: int, last_epoch: int, *, missing: int | None = None, copies: tuple[Copy, ...] = ()
) -> LeftBehind:
    left = LeftBehind([*HOSTS], last_epoch)
    for rank, host in enumerate(HOSTS):
        here = [] if rank == missing else [held(rank, epoch)]
        left.hear(host, wire.Inventory(here, copies=[copy for copy in copies if copy.rank == rank]))
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
    assert "are of an attempt that was over" in left.give_up_broken(SLICES)
    assert left.kept_hosts() == set()
    assert left.broken() == {("a", 0): [0], ("b", 0): [1]}, "and they are ended"


COPIES = (Copy(0, "", 3, 7, 2), Copy(1, "", 3, 7, 2))


def test_what_ended_workers_had_in_memory_remains() -> None:
    left = left_behind(3, 4, copies=COPIES)
    left.give_up_broken(SLICES)
    remains = left.remains(SLICES)
    assert remains is not None
    assert (remains.slices, remains.places) == (("a", "b"), ((0, "a"), (1, "b")))
    assert [(copy.rank, copy.host) for copy in remains.copies] == [(0, "a"), (1, "b")]


def test_nothing_remains_where_workers_go_on_or_hosts_have_not_answered_or_share_their_slice() -> None:
    goes_on = left_behind(3, 3, copies=COPIES)
    goes_on.give_up_broken(SLICES)
    assert goes_on.remains(SLICES) is None
    ended = left_behind(3, 4, copies=COPIES)
    ended.give_up_broken(SLICES)
    assert ended.remains({**SLICES, "c": "a"}) is None
    ended.stopping.add(("a", 0))
    assert ended.remains(SLICES) is None
    assert left_behind(3, 4).remains(SLICES) is None
