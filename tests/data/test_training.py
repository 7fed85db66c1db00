"""A small GPT in double precision: one curve for every number of workers, bit for bit at an equal one.

The ranks of a group are simulated in one process: each computes its own micro-batches, and gradients are
averaged over ranks as DistributedDataParallel does. That averaging itself is real in ``test_frameworks``, and
the workers are in ``test_state``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from data.ranks import streams
from everstep.data import Stream

torch = pytest.importorskip("torch")

from data.gpt import BATCH, GPT, Text, loss_of  # noqa: E402

STEPS = 12


@pytest.fixture(autouse=True)
def one_thread():
    """So small a model only waits for more of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Training:
    """A model, its optimizer and its place in the data, saved and restored as one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT().double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        self.saved = self._state(None)

    def train(self, world_size: int, steps: int) -> None:
        group = streams(world_size, Text(), **BATCH)
        if self.saved["data"] is not None:
            for stream in group:
                stream.load_state_dict(self.saved["data"])
        for each in zip(*group, strict=True):
            loss, samples = 0.0, 0
            for step in each:
                for micro in step:
                    mean = loss_of(self.model, micro)
                    # The gradients of all ranks add up in the model; DDP divides them by their number.
                    (mean * micro.scale / world_size).backward()
                    loss += mean.item() * micro.scale / world_size
                    samples += len(micro.ids)
            assert samples == BATCH["global_batch"]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss)
            self.saved = self._state(group[0])
            if len(self.losses) == steps:
                return

    def killed(self) -> None:
        """What isn't in the saved state is gone."""
        self.model.load_state_dict(self.saved["model"])
        self.optimizer.load_state_dict(self.saved["optimizer"])

    def _state(self, stream: Stream | None) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "data": None if stream is None else stream.state_dict(),
            }
        )


def curve(*attempts: tuple[int, int]) -> Sequence[float]:
    """The losses of a run with (workers, until which step) one after the other."""
    training = Training()
    for world_size, until in attempts:
        training.killed()
        training.train(world_size, until)
    return training.losses


def test_8_then_5_then_7_workers_and_back_have_the_undisturbed_curve():
    undisturbed = curve((8, STEPS))
    disturbed = curve((8, 3), (5, 6), (7, 9), (8, STEPS))
    assert len(disturbed) == STEPS
    assert max(abs(a - b) for a, b in zip(undisturbed, disturbed, strict=True)) < 1e-6
    assert undisturbed[-1] < undisturbed[0] - 0.5


def test_at_an_equal_number_of_workers_the_curve_is_the_same_bit_for_bit():
    assert curve((5, STEPS)) == curve((5, 2), (5, 3), (5, 10), (5, STEPS))
