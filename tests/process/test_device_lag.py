"""Whether GPUs get on with what they are given, by a driver that is made here."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from everstep.process import device_lag
from everstep.process.device_lag import DeviceLag
from everstep.protocol.progress import TICK_S, Page, Progress, Seen, shared_memory
from processes import wait_for

NOT_READY, FAILED, CONTEXT, EVENT = 600, 700, 1 << 40, 1 << 41


class Driver:
    """Of three GPUs, of which the process uses the second."""

    def __init__(self) -> None:
        self.is_done = True
        self.fails = ""
        self.marked: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.current = threading.local()

    def _answer(self, name: str) -> int:
        self.may_answer.wait()
        return FAILED if self.fails == name else 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.current.is_relaxed = mode._obj.value == 2
        return self._answer("cuThreadExchangeStreamCaptureMode")

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 3
        return self._answer("cuDeviceGetCount")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return self._answer("cuDeviceGet")

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:
        active._obj.value = device.value == 1
        return self._answer("cuDevicePrimaryCtxGetState")

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == 1, "this would take memory on a GPU that is not used"
        context._obj.value = None if self.fails == "cuDevicePrimaryCtxRetain" else CONTEXT
        return self._answer("cuDevicePrimaryCtxRetain")

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current.context = context.value
        return self._answer("cuCtxSetCurrent")

    def cuEventCreate(self, event: Any, flags: int) -> int:
        assert self.current.context == CONTEXT
        event._obj.value = None if self.fails == "cuEventCreate" else EVENT
        return self._answer("cuEventCreate")

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        assert self.current.context == CONTEXT
        assert self.current.is_relaxed
        assert event.value == EVENT
        self.marked.append(1)
        return self._answer("cuEventRecord")

    def cuEventQuery(self, event: Any) -> int:
        assert event.value == EVENT
        return self._answer("cuEventQuery") or (0 if self.is_done else NOT_READY)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def driver(torch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(device_lag, "_driver", lambda: driver)
    yield driver
    driver.may_answer.set()


def test_a_gpu_that_finishes_nothing_is_behind_and_one_that_does_is_not(driver: Driver) -> None:
    lag = DeviceLag()
    assert 0.0 <= lag.seconds(False) < 1.0
    driver.is_done = False
    before = time.monotonic()
    wait_for(lambda: lag.seconds(False) > 0.05, "a lag")
    assert lag.seconds(False) <= time.monotonic() - before + 1.0
    assert driver.marked == [1], "one mark, on the GPU that is used, until the GPU has come so far"
    driver.is_done = True
    lag.seconds(False)
    assert lag.seconds(False) < 1.0
    assert len(driver.marked) == 3


def test_while_training_gets_on_nobody_looks(driver: Driver) -> None:
    lag = DeviceLag()
    driver.is_done = False
    lag.seconds(False)
    assert lag.seconds(True) == 0.0
    assert lag.seconds(True) == 0.0
    assert driver.marked == [1]
    assert lag.seconds(False) < 1.0, "counted anew"
    assert driver.marked == [1, 1]


def test_a_driver_that_waits_for_the_gpu_is_not_waited_for(driver: Driver) -> None:
    lag = DeviceLag()
    driver.may_answer.clear()
    threads = threading.active_count()
    began = time.monotonic()
    wait_for(lambda: lag.seconds(False) > 0.3, "a lag")
    assert lag.seconds(False) <= time.monotonic() - began
    assert threading.active_count() == threads + 1
    assert lag.seconds(True) == 0.0
    assert lag.seconds(False) < 0.3, "counted anew, also if the driver doesn't answer"


def test_a_worker_whose_driver_waits_for_the_gpu_keeps_no_lock(driver: Driver) -> None:
    page = Page(shared_memory())
    driver.may_answer.clear()
    Progress(page).keep_ticking(lambda: (0, 0), DeviceLag().seconds)
    wait_for(lambda: Seen(page).device_s > 2 * TICK_S, "a lag")
    ticks = Seen(page).ticks
    wait_for(lambda: Seen(page).ticks > ticks, "a tick")


@pytest.mark.parametrize(
    "call",
    [name for name in vars(Driver) if name.startswith("cu") and name != "cuEventQuery"],
)
def test_a_gpu_in_trouble_is_not_behind(call: str, driver: Driver) -> None:
    driver.is_done, driver.fails = False, call
    lag = DeviceLag()
    assert [lag.seconds(False) for _ in range(3)] == [0.0] * 3


def test_a_gpu_that_fails_later_is_not_behind_any_more(driver: Driver) -> None:
    lag = DeviceLag()
    driver.is_done = False
    wait_for(lambda: lag.seconds(False) > 0.05, "a lag")
    driver.fails = "cuEventQuery"
    assert lag.seconds(False) == 0.0


@pytest.mark.parametrize(
    "why", ["no torch", "half a torch", "half of its cuda", "no GPU in use", "no driver"]
)
def test_where_nothing_can_be_seen_nothing_is_done(
    why: str, torch: SimpleNamespace, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    match why:
        case "no torch":
            monkeypatch.delitem(sys.modules, "torch")
        case "half a torch":
            monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
        case "half of its cuda":
            torch.cuda = ModuleType("torch.cuda")
        case "no GPU in use":
            torch.cuda.is_initialized = lambda: False
        case _:
            monkeypatch.setattr(device_lag, "_driver", lambda: None)
    lag = DeviceLag()
    assert [lag.seconds(False) for _ in range(3)] == [0.0] * 3
    assert driver.marked == []
