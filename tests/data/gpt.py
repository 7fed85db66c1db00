"""A small GPT in double precision, and a training function whose state has its place in the data.

In a module of its own, as a user's would be.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import everstep as train
from everstep.data import Stream
from everstep.torch import State, prepare_model

VOCABULARY, CONTEXT, WIDTH = 17, 12, 16
BATCH: dict[str, Any] = {"global_batch": 24, "micro_batch": 2, "seed": 1, "epochs": None}


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


def loss_of(model: Any, micro: Any) -> Any:
    """The mean over a micro-batch. What is random in it doesn't depend on the rank."""
    torch.manual_seed(micro.seed)
    logits = model(micro.batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), micro.batch[:, 1:].flatten())


def train_gpt(config: dict[str, Any]) -> list[list[int]]:
    """Until a number of steps is done, or a file says that it is enough. Returns the samples of each step.

    Rank 1 of the first attempt is killed in the middle of a step, if one is given.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Without it, DDP divides gradients into other buckets after the first step of a process, and adds them up
    # in another order: after a restart, the first step would differ in its last bits.
    model = prepare_model(GPT().double(), parallel_strategy_kwargs={"find_unused_parameters": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = Stream(Text(), **config["batch"])
    state = State(model=model, optimizer=optimizer, data=stream, seen=[])
    assert state.restore() == stream.step == len(state.seen)
    rank, ranks = train.get_context().get_world_rank(), train.get_context().get_world_size()
    until = Path(config["until"])
    killed_at = config["killed_at"] if rank == 1 and train.get_context().get_attempt() == 1 else None
    for step in stream:
        mine: list[list[int]] = []
        total = torch.zeros(2, dtype=torch.float64)
        for micro in step:
            with step.accumulate(model, micro):
                loss = loss_of(model, micro) * micro.scale
                loss.backward()
            total[0] += loss.detach() / ranks
            mine.append(micro.ids)
        if step.number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        total[1] = rank == 0 and (until.exists() or stream.step == config["steps"])
        torch.distributed.all_reduce(total)
        state.seen = [*state.seen, _in_order(mine, ranks)]
        row = {"step": step.number, "loss": total[0].item(), "samples": len(state.seen[-1])}
        train.report({**row, "workers": ranks, "pid": os.getpid()}, state=state)
        if total[1]:
            return state.seen
        time.sleep(config["pace_s"])
    raise AssertionError("it has no end")


def _in_order(mine: list[list[int]], ranks: int) -> list[int]:
    """The samples of a step, of all ranks, as the stream has them."""
    all_of_them: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(all_of_them, mine)
    most = max(map(len, all_of_them))
    return [number for at in range(most) for dealt in all_of_them if at < len(dealt) for number in dealt[at]]
