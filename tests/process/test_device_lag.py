"""Whether GPUs get on with what they are given, by a torch whose GPUs are made here."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from everstep.process import device_lag
from everstep.process.device_lag import DeviceLag
from processes import wait_for


class Gpus:
    """Three, of which the process uses the second."""

    def __init__(self) -> None:
        self.done = True
        self.marked: list[int] = []
        self.chosen = 0
        self.is_used = True
        cuda = SimpleNamespace(
            is_initialized=lambda: self.is_used,
            device_count=lambda: 3,
            device=self.device,
            Event=lambda: SimpleNamespace(record=self.marked.append, query=lambda: self.done),
            default_stream=lambda number: number,
        )
        self.torch = SimpleNamespace(
            cuda=cuda, _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda number: number == 1)
        )

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        self.chosen = number
        yield


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    monkeypatch.setitem(sys.modules, "torch", gpus.torch)  # type: ignore[arg-type]
    monkeypatch.setattr(device_lag, "_disturbs_no_capture", lambda: True)
    return gpus


def test_a_gpu_that_finishes_nothing_is_behind_and_one_that_does_is_not(gpus: Gpus) -> None:
    lag = DeviceLag()
    assert lag.seconds(False) == 0.0
    gpus.done = False
    before = time.monotonic()
    wait_for(lambda: lag.seconds(False) > 0.05, "a lag")
    assert lag.seconds(False) <= time.monotonic() - before + 1.0
    assert gpus.marked == [1], "one mark, on the GPU that is used, until the GPU has come so far"
    gpus.done = True
    lag.seconds(False)
    assert lag.seconds(False) < 1.0
    assert len(gpus.marked) == 3


def test_while_training_gets_on_nobody_looks(gpus: Gpus) -> None:
    lag = DeviceLag()
    gpus.done = False
    lag.seconds(False)
    assert lag.seconds(True) == 0.0
    assert lag.seconds(True) == 0.0
    assert gpus.marked == [1]
    assert lag.seconds(False) == 0.0, "counted anew"


@pytest.mark.parametrize("why", ["no torch", "no GPU in use", "a driver that is too old"])
def test_where_nothing_can_be_seen_nothing_is_done(
    why: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no torch":
        monkeypatch.delitem(sys.modules, "torch")
    gpus.is_used = why != "no GPU in use"
    if why == "a driver that is too old":
        monkeypatch.setattr(device_lag, "_disturbs_no_capture", lambda: False)
    lag = DeviceLag()
    assert [lag.seconds(False) for _ in range(3)] == [0.0] * 3
    assert gpus.marked == []
