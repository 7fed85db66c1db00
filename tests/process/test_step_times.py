"""What a step's time goes to, as a worker measures it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from everstep.process import step_times
from everstep.process.step_times import StepTimes


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_computing_loading_and_waiting_are_told_apart() -> None:
    times = StepTimes()
    times.begin_step()
    compute(0.02)
    with times.loading():
        time.sleep(0.03)
        compute(0.01)
    with times.waiting():
        time.sleep(0.05)
    time.sleep(0.04)
    pace = times.end_step(1, saves=False)
    assert pace is not None
    assert pace.ran >= 0.02
    assert pace.data >= 0.04
    assert pace.waited >= 0.05
    assert pace.step >= 0.15
    assert pace.ran < pace.step - pace.data - pace.waited


def test_the_time_that_a_thread_gets_no_processor_is_its_hosts() -> None:
    """Beside another process, on the processor that both must share."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        times = StepTimes()
        times.begin_step()
        compute(0.3)
        pace = times.end_step(1, saves=False)
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
    assert pace is not None
    assert pace.queued > 0.05
    assert pace.rest < pace.queued


def test_a_processor_that_is_burnt_while_an_accelerator_computes_is_no_work() -> None:
    times = StepTimes()
    times.has_device = True
    times.begin_step()
    compute(0.02)
    pace = times.end_step(1, saves=False)
    assert pace is not None
    assert pace.ran == 0.0


def test_a_step_that_has_no_beginning_or_a_pause_in_it_tells_nothing() -> None:
    times = StepTimes()
    assert times.end_step(1, saves=False) is None
    times.begin_step()
    times.spoil_step()
    assert times.end_step(1, saves=False) is None
    times.begin_step()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(times.end_step(1, saves=False)))
    thread.start()
    thread.join()
    assert found == [None]


def test_short_steps_are_told_together_at_the_same_reports_by_all_ranks() -> None:
    quick, slow = StepTimes(), StepTimes()
    told: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for times in (quick, slow):
        times.begin_step()
    for index in range(1, 65):
        for rank, times in enumerate((quick, slow)):
            time.sleep(0.002 * rank)
            pace = times.end_step(index, saves=False)
            times.begin_step()
            if pace is not None:
                told[rank].append((index, pace.steps))
    for found in told.values():
        assert sum(steps for _, steps in found) == found[-1][0]
        assert [steps for _, steps in found] == sorted(steps for _, steps in found)
    assert len({index for index, _ in told[0]} & {index for index, _ in told[1]}) >= 5


def test_what_a_report_takes_to_save_is_no_part_of_a_step() -> None:
    times = StepTimes()
    times._every = 2
    times.begin_step()
    time.sleep(0.02)
    assert times.end_step(1, saves=True) is None
    compute(0.2)
    times.begin_step()
    pace = times.end_step(2, saves=False)
    assert pace is not None
    assert pace.steps == 2
    assert pace.ran < 0.1


def test_a_pause_spoils_all_steps_that_are_told_with_it() -> None:
    times = StepTimes()
    times._every = 2
    times.begin_step()
    times.spoil_step()
    assert times.end_step(1, saves=True) is None
    times.begin_step()
    assert times.end_step(2, saves=False) is None
    times.begin_step()
    assert times.end_step(3, saves=False) is None
    pace = times.end_step(4, saves=False)
    assert pace is not None
    assert pace.steps == 2


def test_loading_within_loading_counts_once() -> None:
    times = StepTimes()
    step_times.use(times)
    times.begin_step()
    began = time.monotonic()
    for _ in step_times.timed(step_times.timed(_slowly(3))):
        pass
    took = time.monotonic() - began
    pace = times.end_step(1, saves=False)
    assert pace is not None
    assert 0.03 <= pace.data <= took


def _slowly(count: int) -> object:
    for at in range(count):
        time.sleep(0.01)
        yield at


def test_an_error_while_data_is_loaded_passes_through() -> None:
    def broken() -> object:
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        [*step_times.timed(broken())]
