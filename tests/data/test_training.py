"""A small GPT in double precision: one curve for every number of workers, bit for bit at an equal one.

The ranks of a group are simulated in one process: each computes its own micro-batches, and gradients are
averaged over ranks as DistributedDataParallel does. That averaging itself is real in ``test_frameworks``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from data.ranks import streams
from everstep.data import Stream

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional

VOCABULARY, CONTEXT, WIDTH = 17, 12, 16
BATCH = {"global_batch": 24, "micro_batch": 2, "seed": 1, "epochs": None}
STEPS = 12


@pytest.fixture(autouse=True)
def one_thread():
    """So small a model only waits for more of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Text:
    """Sequences with a rule in them, so that there is something to learn."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        return (torch.arange(CONTEXT + 1) * (index % 5 + 1) + index) % VOCABULARY


class GPT(nn.Module):
    """Two layers of masked attention. Dropout is drawn from the micro-batch's seed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = {"dim_feedforward": 32, "dropout": 0.1, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, **layer) for _ in range(2))
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT, dtype=torch.float64)
        )

    def forward(self, tokens: Any) -> Any:
        hidden = self.tokens(tokens) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.out(hidden)


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
                    torch.manual_seed(micro.seed)
                    logits = self.model(micro.batch[:, :-1])
                    mean = functional.cross_entropy(logits.flatten(0, 1), micro.batch[:, 1:].flatten())
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
