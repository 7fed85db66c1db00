"""What NVML's answers, of a library that is compiled here, make of a worker's use of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.process import gpus
from everstep.process.gpus import GpuUse
from nvml import DRIVER_NOT_LOADED, GIB, NOT_SUPPORTED, UNKNOWN, Gpu, StandIn, forget, without_compiler

pytestmark = without_compiler


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(tmp_path_factory.mktemp("nvml") / "lib")


@pytest.fixture
def nvml(compiled: StandIn) -> Iterator[StandIn]:
    compiled.reports()
    with compiled.in_this_process():
        yield compiled


def test_without_the_library_nothing_is_used(nvml: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.reports(Gpu(90, [(10, GIB, 90)]))
    monkeypatch.setattr(gpus, "_LIBRARY", "libnvidia-ml-that-is-missing.so.1")
    assert gpus.used_by({1: [10]}) == {}


def test_a_library_that_lacks_a_function_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_LIBRARY", None)  # this process itself
    forget()
    assert gpus.used_by({1: [10]}) == {}
    forget()


def test_without_a_driver_nothing_is_used(nvml: StandIn) -> None:
    nvml.reports(Gpu(90, [(10, GIB, 90)]), init=DRIVER_NOT_LOADED)
    assert gpus.used_by({1: [10]}) == {}


def test_a_worker_uses_what_its_processes_use_on_all_gpus(nvml: StandIn) -> None:
    nvml.reports(Gpu(90, [(10, GIB, 90)]), Gpu(50, [(11, 2 * GIB, 30), (12, GIB, 20)]), Gpu(70))
    assert gpus.used_by({1: [10, 11, 12, 13], 2: [20]}) == {1: GpuUse(1.4, 4 * GIB)}


def test_workers_that_share_a_gpu_are_told_apart_by_their_newest_samples(nvml: StandIn) -> None:
    nvml.reports(Gpu(90, [(10, GIB, 60), (20, 2 * GIB, 25), (30, GIB, 0)]))
    assert gpus.used_by({1: [10], 2: [20], 3: [30]}) == {
        1: GpuUse(0.6, GIB),
        2: GpuUse(0.25, 2 * GIB),
        3: GpuUse(0.0, GIB),
    }


def test_workers_that_cannot_be_told_apart_have_the_figure_of_their_gpu(nvml: StandIn) -> None:
    nvml.reports(Gpu(90, [(10, GIB, 60), (20, 2 * GIB, 30)]), samples=NOT_SUPPORTED)
    assert gpus.used_by({1: [10], 2: [20]}) == {1: GpuUse(0.9, GIB), 2: GpuUse(0.9, 2 * GIB)}


def test_a_process_that_is_no_worker_counts_for_none(nvml: StandIn) -> None:
    nvml.reports(Gpu(90, [(99, GIB, 90)]), Gpu(80, [(99, GIB, 70), (10, GIB, 10)]))
    assert gpus.used_by({1: [10]}) == {1: GpuUse(0.1, GIB)}
    nvml.reports(Gpu(90, [(99, GIB, 90)]))
    assert gpus.used_by({1: [10]}) == {}


def test_a_list_that_is_longer_than_expected_is_asked_for_again(nvml: StandIn) -> None:
    nvml.reports(Gpu(90, [(pid, GIB, 1) for pid in range(100, 250)]))
    assert gpus.used_by({1: [249], 2: range(100, 110)}) == {
        1: GpuUse(0.01, GIB),
        2: GpuUse(pytest.approx(0.1), 10 * GIB),
    }


def test_what_the_driver_does_not_say_is_unknown(nvml: StandIn) -> None:
    alone, shared = Gpu(90, [(10, UNKNOWN, 0)], used=GIB), Gpu(90, [(20, UNKNOWN, 0), (21, 1, 0)])
    nvml.reports(alone, shared, rates=NOT_SUPPORTED)
    assert gpus.used_by({1: [10], 2: [20]}) == {1: GpuUse(None, GIB), 2: GpuUse(None, None)}


def test_a_driver_that_does_not_answer_is_waited_for_once(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.reports(Gpu(90, [(10, GIB, 90)]))
    with nvml.not_answering():
        with monkeypatch.context() as impatient:
            impatient.setattr(gpus, "_PATIENCE_S", 0.0)
            assert gpus.used_by({1: [10]}) == {}
        stuck = gpus._Reading.newest()
        assert gpus.used_by({1: [10]}) == {}
        assert gpus._Reading.newest() is stuck
    stuck.join()
    assert gpus.used_by({1: [10]}) == {1: GpuUse(0.9, GIB)}
