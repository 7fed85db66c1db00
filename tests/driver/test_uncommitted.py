"""Checkpoints that wait for ranks are told by name, soon, and not again and again."""

from __future__ import annotations

import pytest

from everstep.control import events as e
from everstep.control.controller import Controller, Settings
from everstep.deadlines import Deadlines
from everstep.driver.uncommitted import Uncommitted
from everstep.saved.reports import Part
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostView

LIMITS = Deadlines()


class Looks:
    """Two replica groups of two ranks, of which some have reported."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._uncommitted = Uncommitted(self.said.append)
        self._controller = Controller(Settings(workers_min=4, workers_max=4, group_size=2))
        hosts = tuple(HostView(f"h{n}", f"s{n}", 0, 1, 1, True, True) for n in range(4))
        places = tuple(
            Assignment(n, f"h{n}", 0, 1, n, 4, 4, f"s{n}", n, 4, n // 2, 2, n % 2, 2) for n in range(4)
        )
        self._controller.handle(e.CapacityChanged(at=0.0, hosts=hosts))
        self._controller.handle(
            e.RunOpened(at=0.0, last_epoch=1, adopted=e.Adopted(1, places, ((0, 0), (1, 0)), False))
        )

    def report(self, rank: int, index: int, *, saves: bool = False, owes: bool = False) -> None:
        parts = (Part(index, f"c{index}-g{rank // 2}"),) if saves else ()
        owed = (index,) if owes else ()
        self._controller.handle(
            e.Reported(at=0.0, epoch=1, generation=0, rank=rank, upto=index, parts=parts, owed=owed)
        )

    def look(self, at: float) -> list[str]:
        before = len(self.said)
        self._uncommitted.look(self._controller, LIMITS, at)
        return self.said[before:]


def test_a_rank_that_is_behind_is_named_soon_and_once_more_later() -> None:
    looks = Looks()
    looks.report(0, 1, saves=True)
    assert looks.look(0.0) == looks.look(LIMITS.report_warn_s) == []
    looks.report(0, 2, saves=True)
    (told,) = looks.look(LIMITS.report_warn_s + 0.1)
    assert told.startswith("checkpoint c1-g0 can't be committed yet: rank 1 has not finished report 1. ")
    assert looks.look(LIMITS.report_warn_s + 0.2) == []
    (again,) = looks.look(LIMITS.commit_warn_s + 0.1)
    assert again == told
    assert looks.look(LIMITS.commit_warn_s + 0.2) == []


def test_each_replica_group_is_told_once() -> None:
    looks = Looks()
    looks.report(0, 1, saves=True)
    looks.report(2, 1, saves=True)
    looks.look(0.0)
    assert len(looks.look(LIMITS.report_warn_s + 0.1)) == 2
    assert len(looks.look(LIMITS.commit_warn_s + 0.1)) == 2
    assert looks.look(LIMITS.commit_warn_s + 0.2) == []


@pytest.mark.parametrize("index", [1, 2])
def test_an_upload_that_takes_long_is_no_missing_report(index: int) -> None:
    looks = Looks()
    looks.report(0, index, saves=True)
    looks.report(1, index, owes=True)
    looks.look(0.0)
    assert looks.look(LIMITS.report_warn_s + 0.1) == []
    (told,) = looks.look(LIMITS.commit_warn_s + 0.1)
    assert told.startswith(f"checkpoint c{index}-g0 can't be committed yet: rank 1 still uploads to it. ")
    assert "a checkpoint_upload_fn needs one of yours" in told


def test_an_upload_that_takes_long_is_told_also_where_no_rank_has_finished_its_own() -> None:
    looks = Looks()
    looks.report(0, 1, owes=True)
    looks.report(1, 1, owes=True)
    assert looks.look(0.0) == looks.look(LIMITS.report_warn_s + 0.1) == []
    (told,) = looks.look(LIMITS.commit_warn_s + 0.1)
    assert told.startswith(
        "the checkpoint of report 1 can't be committed yet: ranks 0, 1 still upload to it. "
    )
    assert looks.look(LIMITS.commit_warn_s + 0.2) == []
