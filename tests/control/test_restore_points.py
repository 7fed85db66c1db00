"""What workers start from: the newest snapshot that all of them have in memory, else a checkpoint."""

from __future__ import annotations

from hands import Hands, views

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller, Settings
from everstep.control.events import Adopted, Notice, Remains
from everstep.failures import Kind
from everstep.saved.snapshots import At, Copy


def two(**more: object) -> Hands:
    settings = Settings(workers_min=2, workers_max=2, **{"max_failures": -1, **more})  # type: ignore[arg-type]
    return Hands(settings, views("a", "b", "c"))


def copy(hands: Hands, index: int, *ranks: int) -> None:
    for rank in ranks or (0, 1):
        hands.report(rank, index, taken=True)


def test_a_snapshot_that_all_ranks_have_is_what_a_restart_begins_with() -> None:
    hands = two()
    hands.checkpoint(1)
    copy(hands, 2)
    hands.pass_time(1.5)
    copy(hands, 3, 0)
    hands.fail(1)
    start = hands.last(c.StartWorkers)
    assert (start.snapshot, start.checkpoint) == (At(1, 2), "e1-g0-k1")
    for rank in (0, 1):
        hands.report(rank, 1)
    recovered = hands.last(c.Recovered)
    assert (recovered.steps_lost, recovered.state_from) == (1, "memory, report 2, 1.5 s old")


def test_a_newer_state_in_storage_is_restored_rather_than_a_snapshot() -> None:
    hands = two()
    hands.saves_state = True
    copy(hands, 1)
    hands.checkpoint(2)
    hands.fail(0)
    start = hands.last(c.StartWorkers)
    assert (start.snapshot, start.checkpoint) == (None, "e1-g0-k2")
    hands.fail(1, Kind.START)
    hands.pass_time(10.0)
    assert hands.last(c.StartWorkers).snapshot is None, "it is let go"


def test_what_the_function_saved_itself_does_not_take_the_place_of_a_snapshot() -> None:
    hands = two()
    copy(hands, 1)
    hands.checkpoint(2)
    hands.fail(0)
    start = hands.last(c.StartWorkers)
    assert (start.snapshot, start.checkpoint) == (At(1, 1), "e1-g0-k2")


def test_ranks_hear_what_becomes_of_their_snapshots() -> None:
    hands = two()
    copy(hands, 1)
    copy(hands, 2, 0)
    hands.report(1, 2)
    assert [(k.ranks, k.kept, k.upto) for k in hands.all(c.KeepSnapshot)] == [
        ((0, 1), (At(1, 1),), At(1, 1)),
        ((0,), (At(1, 1),), At(1, 2)),
    ]


def test_the_memory_of_a_lost_host_is_not_counted_on() -> None:
    hands = two()
    hands.checkpoint(1)
    hands.pass_time(2.0)
    copy(hands, 2)
    hands.lose("a.0")
    start = hands.last(c.StartWorkers)
    assert (start.snapshot, start.checkpoint) == (None, "e1-g0-k1")
    for rank in (0, 1):
        hands.report(rank, 1)
    assert hands.last(c.Recovered).state_from == "storage, e1-g0-k1, 2.0 s old"


def test_a_lost_host_is_made_up_for_by_copies_on_another_one() -> None:
    hands = two(snapshot_copies=1)
    hands.checkpoint(1)
    copy(hands, 2)
    assert [(m.rank, m.source, m.to) for m in hands.all(c.CopySnapshot)] == [
        (0, "a.0", "b.0"),
        (1, "b.0", "a.0"),
    ]
    for rank, host in enumerate(("b.0", "a.0")):
        hands.tell(e.SnapshotCopied(at=0.0, host=host, rank=rank, snapshot=At(1, 2)))
    hands.lose("a.0")
    start = hands.last(c.StartWorkers)
    assert (start.snapshot, start.sources) == (At(1, 2), ((0, ("b.0",)), (1, ("b.0",))))
    for rank in (0, 1):
        hands.report(rank, 1)
    assert hands.last(c.Recovered).state_from.startswith("memory of other hosts, report 2, ")


def test_a_host_that_is_lost_with_the_one_that_has_its_copies_is_restored_from_storage() -> None:
    hands = Hands(
        Settings(workers_min=2, workers_max=2, max_failures=-1, snapshot_copies=1), views("a", "b", "c", "d")
    )
    hands.checkpoint(1)
    copy(hands, 2)
    for rank, host in enumerate(("b.0", "a.0")):
        hands.tell(e.SnapshotCopied(at=0.0, host=host, rank=rank, snapshot=At(1, 2)))
    hands.lose("a.0")
    hands.lose("b.0")
    hands.pass_time(10.0)
    assert hands.last(c.StartWorkers).snapshot is None
    for rank in (0, 1):
        hands.report(rank, 1)
    assert hands.last(c.Recovered).state_from.startswith("storage, e1-g0-k1, ")


def waits_with_a_copy() -> Hands:
    """One of two hosts is lost, the other has the state of both, and there is no third."""
    settings = Settings(workers_min=2, workers_max=2, max_failures=-1, snapshot_copies=1)
    hands = Hands(settings, views("a", "b"))
    hands.checkpoint(1)
    copy(hands, 2)
    for rank, host in enumerate(("b.0", "a.0")):
        hands.tell(e.SnapshotCopied(at=0.0, host=host, rank=rank, snapshot=At(1, 2)))
    hands.lose("a.0")
    assert hands.phases[-1] == "waiting"
    return hands


def test_a_run_that_waits_for_a_host_keeps_those_that_have_its_state() -> None:
    hands = waits_with_a_copy()
    assert [r.slices for r in hands.all(c.Release)] == [("a",)]
    hands.pass_time(60.0)
    hands.capacity(*views("c"))
    start = hands.last(c.StartWorkers)
    assert (start.epoch, start.snapshot, start.sources) == (2, At(1, 2), ((0, ("b.0",)), (1, ("b.0",))))


def test_it_does_not_keep_them_for_ever() -> None:
    hands = waits_with_a_copy()
    hands.pass_time(hands.settings.deadlines.memory_wait_s)
    assert [r.slices for r in hands.all(c.Release)] == [("a",), ("b",)]
    hands.capacity(*views("c"))
    start = hands.last(c.StartWorkers)
    assert (start.epoch, start.snapshot, start.checkpoint) == (2, None, "e1-g0-k1")


def test_a_run_that_waits_without_any_state_in_memory_keeps_no_host() -> None:
    hands = Hands(Settings(workers_min=2, workers_max=2, max_failures=-1), views("a", "b"))
    hands.checkpoint(1)
    hands.lose("a.0")
    assert [r.slices for r in hands.all(c.Release)] == [("a",), ("b",)]


def test_a_snapshot_that_can_not_be_restored_is_not_tried_again() -> None:
    hands = two()
    hands.checkpoint(1)
    copy(hands, 2)
    hands.fail(0)
    hands.tell(e.SnapshotDamaged(at=0.0, snapshot=At(1, 2)))
    hands.fail(1, Kind.START)
    hands.pass_time(10.0)
    start = hands.last(c.StartWorkers)
    assert (start.epoch, start.snapshot, start.checkpoint) == (3, None, "e1-g0-k1")


def test_a_start_that_fails_keeps_what_it_was_to_begin_with() -> None:
    hands = two()
    copy(hands, 1)
    hands.silent.add(c.StartWorkers)
    hands.fail(0)
    hands.fail(1, Kind.START)
    hands.pass_time(10.0)
    assert [start.snapshot for start in hands.all(c.StartWorkers)] == [None, At(1, 1), At(1, 1)]


def test_a_snapshot_is_progress_so_that_the_next_recovery_is_immediate() -> None:
    hands = two()
    for attempt in (1, 2, 3):
        copy(hands, 1)
        hands.fail(0)
        assert hands.brain.epoch == attempt + 1


def test_workers_of_an_earlier_driver_keep_what_their_hosts_have() -> None:
    first = two()
    adopted = Adopted(
        1,
        tuple(first.places.values()),
        ((0, 0),),
        copies=tuple(Copy(r, f"{h}.0", 1, 7, 2) for r, h in enumerate("ab")),
    )
    settings = Settings(workers_min=2, workers_max=2, max_failures=-1)
    hands = Hands(settings, views("a", "b", "c"), e.RunOpened(at=0.0, last_epoch=1, adopted=adopted))
    hands.places, hands.generations = first.places, first.generations
    assert hands.last(c.KeepSnapshot).kept == (At(1, 7),)
    hands.fail(0)
    assert hands.last(c.StartWorkers).snapshot == At(1, 7)


def test_what_ended_workers_of_an_earlier_driver_had_in_memory_is_restored_where_it_lies() -> None:
    remains = Remains(("b", "c"), tuple(Copy(r, f"{h}.0", 3, 7, 2) for r, h in enumerate("bc")))
    settings = Settings(workers_min=2, workers_max=2, max_failures=-1)
    hands = Hands(settings, views("a", "b", "c"), e.RunOpened(at=0.0, last_epoch=4, remains=remains))
    start = hands.last(c.StartWorkers)
    assert (start.epoch, start.snapshot) == (5, At(3, 7))
    assert [a.host for a in start.assignments] == ["b.0", "c.0"]
    assert hands.all(c.Reserve) == [], "they are held already"
    assert hands.last(c.GroupStarted).from_memory


def test_slices_that_an_earlier_driver_held_and_nobody_needs_are_given_back() -> None:
    remains = Remains(("a", "b", "c"), (Copy(0, "a.0", 1, 1, 3),))
    settings = Settings(workers_min=2, workers_max=2, max_failures=-1)
    hands = Hands(settings, views("a", "b", "c"), e.RunOpened(at=0.0, last_epoch=1, remains=remains))
    assert hands.last(c.Release).slices == ("c",)
    assert hands.last(c.StartWorkers).snapshot is None


def test_an_older_snapshot_is_restored_where_the_newest_was_on_a_host_that_is_given_back() -> None:
    """The newest had not been copied to other hosts yet."""
    newest = [Copy(rank, host, 3, 8, 2) for rank, host in enumerate(("a.0", "b.0"))]
    older = [Copy(rank, host, 3, 7, 2) for rank in (0, 1) for host in ("a.0", "b.0")]
    remains = Remains(("a", "b", "c"), (*newest, *older))
    settings = Settings(workers_min=2, workers_max=2, max_failures=-1, snapshot_copies=1)
    taken_away = Notice("a", 1000.0, ("a.0",))
    opened = e.RunOpened(at=0.0, last_epoch=4, notices=(taken_away,), remains=remains)
    start = Hands(settings, views("a", "b", "c"), opened).last(c.StartWorkers)
    assert [a.host for a in start.assignments] == ["b.0", "c.0"]
    assert start.snapshot == At(3, 7)
    assert start.sources == ((0, ("b.0",)), (1, ("b.0",)))


def test_replica_groups_take_their_state_from_each_other() -> None:
    hands = Hands(Settings(workers_min=2, workers_max=2, max_failures=-1, group_size=1), views("a", "b", "c"))
    copy(hands, 1)
    assert hands.all(c.KeepSnapshot) == []


def test_a_copy_that_an_earlier_driver_asked_for_lets_a_host_forget_nothing_before_the_run_is_open() -> None:
    controller = Controller(Settings(workers_min=2, workers_max=2))
    controller.handle(e.CapacityChanged(at=0.0, hosts=views("a", "b")))
    copied = e.SnapshotCopied(at=1.0, host="b.0", rank=0, snapshot=At(1, 2))
    assert controller.handle(copied) == []
