"""How often snapshots are taken, from what they cost."""

from __future__ import annotations

from everstep import MemoryConfig
from everstep.driver.states import SnapshotCadence
from everstep.protocol import worker_messages


class Training:
    """Two ranks that report at the same time, and do what they are told at once."""

    def __init__(self, memory: MemoryConfig | None, step_s: float, copy_s: float) -> None:
        self.proposed: list[int] = []
        self.said: list[str] = []
        self.cadence = SnapshotCadence(memory, self._propose, self.said.append)
        self.every = self.cadence.reports
        self.step_s, self.copy_s = step_s, copy_s
        self.now, self.index, self.stalled = 0.0, 0, 0.0

    def _propose(self, value: worker_messages.AnyValue) -> None:
        assert isinstance(value, worker_messages.SnapshotEvery)
        self.every = value.reports
        self.proposed.append(value.reports)

    def go_on(self, reports: int) -> None:
        for _ in range(reports):
            self.index += 1
            copies = bool(self.every) and self.index % self.every == 0
            took = self.copy_s if copies else 0.0
            self.now += self.step_s + took
            self.stalled += took
            self.cadence.reported(0, self.index, took / 2, self.now)
            self.cadence.reported(1, self.index, took, self.now)
            self.cadence.look()


def test_snapshots_are_taken_as_often_as_costs_two_percent_of_the_time() -> None:
    training = Training(MemoryConfig(), step_s=0.1, copy_s=0.05)
    training.go_on(50)
    began, before = training.now, training.stalled
    training.go_on(1000)
    assert 0.01 < (training.stalled - before) / (training.now - began) <= 0.021


def test_a_cheap_snapshot_is_taken_with_every_report() -> None:
    training = Training(MemoryConfig(), step_s=1.0, copy_s=0.01)
    training.go_on(100)
    assert training.proposed == []
    assert training.every == 1


def test_a_cadence_that_fits_is_left_alone() -> None:
    training = Training(MemoryConfig(), step_s=0.1, copy_s=0.05)
    training.go_on(2000)
    assert len(training.proposed) <= 3, "ranks are held up by each change"


def test_seconds_between_snapshots_are_kept_whatever_a_step_takes() -> None:
    training = Training(MemoryConfig(every_s=2.0), step_s=0.1, copy_s=0.01)
    training.go_on(100)
    assert training.every == 20
    training.step_s = 0.5
    training.go_on(100)
    assert training.every in (4, 5)


def test_zero_seconds_are_a_snapshot_with_every_report_whatever_it_costs() -> None:
    training = Training(MemoryConfig(every_s=0), step_s=0.1, copy_s=1.0)
    training.go_on(100)
    assert training.every == 1


def test_a_host_without_enough_memory_ends_snapshots_at_all_ranks_and_is_told_of_once() -> None:
    training = Training(MemoryConfig(), step_s=0.1, copy_s=0.01)
    training.go_on(1)
    for rank in (1, 0):
        training.cadence.refused(rank, "8.0 GiB needed, and 3.0 GiB of the host's 16.0 GiB are free")
    training.go_on(50)
    assert training.proposed[-1] == training.every == 0
    (line,) = training.said
    assert "rank 1 has no room for them (8.0 GiB needed, and 3.0 GiB of" in line
    assert "MemoryConfig.host_fraction" in line


def test_without_memory_none_are_taken() -> None:
    training = Training(None, step_s=0.1, copy_s=0.01)
    training.go_on(50)
    assert (training.every, training.proposed) == (0, [])


def test_workers_of_an_earlier_driver_are_told_even_what_this_one_begins_with() -> None:
    training = Training(MemoryConfig(), step_s=1.0, copy_s=0.01)
    training.cadence.adopt()
    training.every = 50
    training.go_on(102)
    assert training.proposed == [1]


def test_a_snapshot_that_is_taken_beside_training_is_whole_before_the_next_one() -> None:
    training = Training(MemoryConfig(), step_s=0.1, copy_s=0.0)
    for _ in range(20):
        training.go_on(1)
        training.cadence.taken(1, copy_s=0.001, whole_s=0.6)
    assert training.every == 8
    training.cadence.taken(1, copy_s=0.1, whole_s=0.6)
    training.go_on(100)
    assert training.every > 8, "what training waits is still at most two percent"
