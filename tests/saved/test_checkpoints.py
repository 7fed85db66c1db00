"""Which checkpoint is the newest, also where replica groups make them by themselves."""

from __future__ import annotations

from everstep.identity import Incarnation
from everstep.saved.checkpoints import CheckpointRef, Checkpoints
from everstep.saved.retention import Scored, to_remove


def ref(group: int, index: int) -> CheckpointRef:
    return CheckpointRef(f"c{group}-{index}", 1, index, group)


def of(group: int) -> Incarnation:
    return Incarnation(1, group, 0)


def commit(saved: Checkpoints, group: int, index: int) -> CheckpointRef:
    found = saved.begin(ref(group, index))
    saved.committed(found.folder)
    return found


def test_an_upload_that_takes_long_does_not_make_an_older_checkpoint_the_newest() -> None:
    saved = Checkpoints()
    saved.reported(of(0), [3], at=10.0)
    saved.reported(of(1), [3], at=10.1)
    saved.reported(of(0), [4], at=20.0)
    there = [commit(saved, 0, 3), commit(saved, 0, 4), commit(saved, 1, 3)]
    assert saved.newest is not None
    assert saved.newest.folder == "c0-4"
    assert to_remove(map(Scored, there), [], num_to_keep=1) == ["c0-3", "c1-3"]


def test_what_an_earlier_driver_had_committed_is_older_than_what_is_reported_now() -> None:
    before = CheckpointRef("before", 1, 9, 0, 0, order=7)
    saved = Checkpoints([before])
    saved.reported(of(1), [2], at=1.0)
    assert commit(saved, 1, 2).order > before.order


def test_what_nobody_was_heard_to_save_comes_when_it_is_complete() -> None:
    saved = Checkpoints()
    saved.reported(of(0), [1], at=1.0)
    assert commit(saved, 1, 1).order > commit(saved, 0, 1).order
