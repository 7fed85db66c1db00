"""Which snapshots are kept, and which may be written over."""

from __future__ import annotations

import random

from everstep.saved.snapshots import At, Copy, Snapshots, Transfer, Verdict, peers_of

TWO = {0: "a", 1: "b"}


def first(*members: int, copies: int = 0) -> Snapshots:
    snapshots = Snapshots(copies)
    assert snapshots.begin({rank: f"host-{rank}" for rank in members}, {}) is None
    return snapshots


def took(snapshots: Snapshots, rank: int, index: int, epoch: int = 1) -> list[object]:
    return list(snapshots.reported(rank, At(epoch, index), [At(epoch, index)], 0.0))


def test_a_snapshot_is_kept_once_every_rank_has_it() -> None:
    snapshots = first(0, 1)
    assert took(snapshots, 0, 1) == []
    assert snapshots.kept is None
    assert took(snapshots, 1, 1) == [((0, 1), (At(1, 1),), At(1, 1), ())]
    assert snapshots.kept == At(1, 1)


def test_one_that_a_rank_has_passed_without_it_is_given_up() -> None:
    snapshots = first(0, 1)
    took(snapshots, 0, 1)
    took(snapshots, 1, 1)
    assert took(snapshots, 0, 2) == []
    assert snapshots.reported(1, At(1, 2), [], 0.0) == [((0,), (At(1, 1),), At(1, 2), ())]
    assert snapshots.kept == At(1, 1)


def test_one_that_a_rank_has_passed_before_another_takes_it_is_given_up() -> None:
    snapshots = first(0, 1)
    assert snapshots.reported(1, At(1, 1), [], 0.0) == []
    assert took(snapshots, 0, 1) == [((0,), (), At(1, 1), ())]


def test_the_same_ranks_on_the_same_hosts_restore_what_was_kept() -> None:
    snapshots = first(0, 1)
    took(snapshots, 0, 1)
    took(snapshots, 1, 1)
    took(snapshots, 0, 2)
    assert snapshots.begin({0: "host-0", 1: "host-1"}, {}) == At(1, 1)
    # What one rank had of a later report in the attempt before is none of this attempt's.
    assert took(snapshots, 1, 2, epoch=2) == []
    assert snapshots.kept == At(1, 1)


def test_ranks_in_other_places_and_of_another_number_restore_what_is_elsewhere() -> None:
    for members in ({0: "host-1", 1: "host-0"}, {0: "host-0"}, {0: "host-0", 1: "host-1", 2: "host-1"}):
        snapshots = first(0, 1)
        took(snapshots, 0, 1)
        took(snapshots, 1, 1)
        assert snapshots.sources(At(1, 1)) == ()
        assert snapshots.begin(members, {}) == At(1, 1)
        assert snapshots.sources(At(1, 1)) == ((0, ("host-0",)), (1, ("host-1",)))


def test_a_lost_host_takes_its_snapshots_along() -> None:
    snapshots = first(0, 1)
    took(snapshots, 0, 1)
    took(snapshots, 1, 1)
    snapshots.host_lost("another")
    assert snapshots.kept == At(1, 1)
    snapshots.host_lost("host-1")
    assert snapshots.kept is None


def test_snapshots_of_another_number_of_ranks_are_not_taken_over() -> None:
    snapshots = Snapshots()
    copies = [Copy(rank, host, 1, 5, 3) for rank, host in TWO.items()]
    assert snapshots.adopt(TWO, {}, copies) == []
    assert snapshots.kept is None


def test_what_ranks_say_late_of_a_lost_host_does_not_count() -> None:
    snapshots = first(0, 1)
    took(snapshots, 0, 1)
    snapshots.host_lost("host-1")
    assert took(snapshots, 1, 1) == []
    assert snapshots.kept is None


def test_a_later_driver_keeps_the_newest_that_all_hosts_have() -> None:
    snapshots = Snapshots()
    copies = [Copy(0, "a", 1, 9, 2), Copy(0, "a", 1, 10, 2), Copy(1, "b", 1, 10, 2), Copy(1, "b", 1, 11, 2)]
    assert snapshots.adopt(TWO, {}, copies) == [((0, 1), (At(1, 10),), At(1, 10), ())]
    # What it hears again is older than what it has seen itself.
    assert snapshots.reported(0, At(1, 10), [At(1, 9), At(1, 10)], 0.0) == []
    assert snapshots.reported(0, At(1, 11), [], 0.0) == [((1,), (At(1, 10),), At(1, 11), ())]


def test_of_what_ended_ranks_left_everything_is_kept_until_it_is_known_who_starts_where() -> None:
    snapshots = Snapshots(copies=1)
    everywhere = [Copy(rank, host, 1, 9, 2) for rank in TWO for host in TWO.values()]
    snapshots.remain([*everywhere, Copy(0, "host-0", 1, 10, 2), Copy(1, "host-1", 1, 10, 2)])
    assert snapshots.kept_all == (At(1, 9), At(1, 10))
    snapshots.host_lost("host-1")
    assert snapshots.begin({0: "host-0", 1: "host-2"}, {}) == At(1, 9)


def test_what_is_taken_over_leaves_room_for_new_ones() -> None:
    snapshots = Snapshots()
    snapshots.remain([Copy(rank, host, 1, n, 2) for rank, host in TWO.items() for n in (1, 2, 3)])
    assert snapshots.begin(TWO, {}) == At(1, 3)
    assert snapshots.kept_all == (At(1, 2), At(1, 3))


def test_a_later_driver_counts_on_copies_that_lie_elsewhere() -> None:
    snapshots = Snapshots()
    snapshots.adopt(TWO, {}, [Copy(0, "a", 1, 1, 2), Copy(1, "a", 1, 1, 2)])
    assert snapshots.kept == At(1, 1)
    assert snapshots.sources(At(1, 1)) == ((0, ("a",)), (1, ("a",)))


def copied(snapshots: Snapshots, rank: int, index: int, failed: bool = False) -> list[object]:
    """The other of two hosts has, or can't have, a copy."""
    return list(snapshots.copied(f"host-{1 - rank}", rank, At(1, index), failed=failed))


def sent(index: int) -> list[object]:
    return [Transfer(r, f"host-{r}", f"host-{1 - r}", At(1, index)) for r in (0, 1)]


def test_what_every_rank_has_is_copied_to_another_host_and_outlives_its_own() -> None:
    snapshots = first(0, 1, copies=1)
    took(snapshots, 0, 1)
    assert took(snapshots, 1, 1) == [((0, 1), (At(1, 1),), At(1, 1), ()), *sent(1)]
    assert copied(snapshots, 0, 1) == []
    assert copied(snapshots, 1, 1) == [((0, 1), (At(1, 1),), At(1, 1), ())]
    snapshots.host_lost("host-1")
    assert snapshots.begin({0: "host-0", 1: "host-2"}, {}) == At(1, 1)
    assert snapshots.sources(At(1, 1)) == ((0, ("host-0",)), (1, ("host-0",)))


def test_the_last_one_with_copies_is_kept_until_its_successor_has_them() -> None:
    snapshots = first(0, 1, copies=1)
    for index in (1, 2):
        took(snapshots, 0, index)
        took(snapshots, 1, index)
    copied(snapshots, 0, 1)
    both = (At(1, 1), At(1, 2))
    assert copied(snapshots, 1, 1) == [((0, 1), both, At(1, 1), ()), *sent(2)]
    copied(snapshots, 1, 2)
    assert snapshots.kept_all == both
    snapshots.host_lost("host-0")
    assert snapshots.kept == At(1, 1), "rank 0 alone had the newer one"


def test_a_copy_that_is_heard_of_after_the_loss_of_its_host_counts() -> None:
    snapshots = first(0, 1, copies=1)
    took(snapshots, 0, 1)
    took(snapshots, 1, 1)
    snapshots.host_lost("host-1")
    assert snapshots.kept is None
    assert copied(snapshots, 0, 1) == [], "it was lost with the host that has it"
    assert copied(snapshots, 1, 1) == []
    assert snapshots.begin({0: "host-0", 1: "host-2"}, {}) == At(1, 1)


def test_hosts_hear_which_copies_they_need_not_keep() -> None:
    snapshots = first(0, 1, copies=1)
    for index in (1, 2):
        took(snapshots, 0, index)
        took(snapshots, 1, index)
        copied(snapshots, 0, index)
        verdict = copied(snapshots, 1, index)[0]
    assert verdict == ((0, 1), (At(1, 2),), At(1, 2), ("host-0", "host-1"))
    assert copied(snapshots, 0, 1) == [((), (At(1, 2),), At(1, 1), ("host-1",))], "it came too late"


def test_a_copy_that_can_not_be_made_is_tried_again_with_the_next_snapshot() -> None:
    snapshots = first(0, 1, copies=1)
    took(snapshots, 0, 1)
    took(snapshots, 1, 1)
    assert copied(snapshots, 0, 1, failed=True) == [((0, 1), (At(1, 1),), At(1, 1), ())]
    took(snapshots, 0, 2)
    assert took(snapshots, 1, 2) == [((0, 1), (At(1, 2),), At(1, 2), ("host-0", "host-1")), *sent(2)]


def test_copies_go_to_another_slice_where_there_is_one() -> None:
    four = dict(enumerate("abcd"))
    alone = {"a": ("b",), "b": ("c",), "c": ("d",), "d": ("a",)}
    assert peers_of(four, dict.fromkeys("abcd", "s"), 1) == alone
    assert peers_of(four, {}, 1) == alone
    pairs = {"a": "s", "b": "s", "c": "t", "d": "t"}
    assert peers_of(four, pairs, 1) == {"a": ("c",), "b": ("d",), "c": ("a",), "d": ("b",)}
    assert peers_of({0: "a"}, {}, 1) == {"a": ()}
    assert peers_of(dict(enumerate("abc")), {}, 2) == {"a": ("b", "c"), "b": ("c", "a"), "c": ("a", "b")}


def test_a_rank_that_has_returned_takes_no_more() -> None:
    snapshots = first(0, 1)
    assert snapshots.returned(1) == []
    assert took(snapshots, 0, 1) == [((0,), (), At(1, 1), ())]


def test_one_that_a_rank_is_still_copying_is_not_given_up() -> None:
    snapshots = first(0, 1)
    assert took(snapshots, 0, 1) == []
    assert snapshots.reported(1, At(1, 1), [], 0.0, [At(1, 1)]) == []
    assert snapshots.reported(1, At(1, 2), [], 0.0) == []
    assert snapshots.kept is None
    assert snapshots.reported(1, At(1, 2), [At(1, 1)], 0.0) == [((0, 1), (At(1, 1),), At(1, 1), ())]
    assert snapshots.kept == At(1, 1)


def test_what_a_rank_began_to_copy_and_never_had_is_given_up_when_it_returns() -> None:
    snapshots = first(0, 1)
    took(snapshots, 0, 1)
    assert snapshots.reported(1, At(1, 1), [], 0.0, [At(1, 1)]) == []
    assert snapshots.returned(1) == [((0,), (), At(1, 1), ())]


class Rank:
    """Two slots, as a worker has them."""

    def __init__(self) -> None:
        self.slots: list[At | None] = [None, None]
        self.kept: tuple[At, ...] = ()
        self.open: At | None = None
        self.late: At | None = None
        """What it copies while it goes on."""

    def take(self, at: At) -> bool:
        """False: both slots are taken, and it has to wait."""
        if self.open is not None:
            return False
        free = next(i for i, held in enumerate(self.slots) if held is None or held not in self.kept)
        self.slots[free] = self.open = at
        return True

    def hear(self, kept: tuple[At, ...], upto: At) -> None:
        if self.open is not None and self.open <= upto:
            self.open = None
        self.kept = kept


def test_at_every_instant_all_ranks_have_what_is_kept() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        snapshots, ranks = first(0, 1, 2), {r: Rank() for r in range(3)}
        told: dict[int, list[tuple[tuple[At, ...], At]]] = {r: [] for r in ranks}
        done = dict.fromkeys(ranks, 0)
        for _ in range(300):
            rank = rng.randrange(3)
            if told[rank] and rng.random() < 0.6:
                ranks[rank].hear(*told[rank].pop(0))
            else:
                at = At(1, done[rank] + 1)
                skips = rng.random() < 0.1
                late, is_late = ranks[rank].late, not skips and rng.random() < 0.3
                if late is None and not skips and not ranks[rank].take(at):
                    continue
                if late is not None:  # it is whole now
                    ranks[rank].late, at, copied, copying = None, At(1, done[rank]), [late], []
                else:
                    done[rank] += 1
                    copied, copying = ([], [at]) if is_late else ([] if skips else [at], [])
                    ranks[rank].late = at if is_late else None
                for verdict in snapshots.reported(rank, at, copied, 0.0, copying):
                    assert isinstance(verdict, Verdict)
                    for other in verdict.ranks:
                        told[other].append((verdict.kept, verdict.upto))
            if snapshots.kept is not None:
                assert all(
                    snapshots.kept in each.slots and snapshots.kept != each.late for each in ranks.values()
                ), f"seed {seed}"
        assert snapshots.kept is not None
        assert snapshots.kept.report > 10, "ranks wait for each other"
