"""Training functions in which one rank is slower than the others, each in its own way, for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import everstep as train

STEP_S = 0.12
MORE_S = 0.08


def is_slow(config: dict[str, Any]) -> bool:
    """This rank is, now."""
    return train.get_context().get_world_rank() == config["rank"] and not Path(config["recover"]).exists()


def goes_on(config: dict[str, Any]) -> bool:
    return not train.collective.broadcast_from_rank_zero(Path(config["until"]).exists())


def compute(seconds: float) -> None:
    """For so long by the clock that stands still while this thread has no processor."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def computes(config: dict[str, Any]) -> None:
    while goes_on(config):
        time.sleep(STEP_S)
        if is_slow(config):
            compute(MORE_S)
        train.report({})


def sleeps(config: dict[str, Any]) -> None:
    while goes_on(config):
        time.sleep(STEP_S + (MORE_S if is_slow(config) else 0.0))
        train.report({})


class SlowData:
    """A data set that is slow on one rank."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        if is_slow(self._config):
            time.sleep(MORE_S)
        return index


def waits_for_data(config: dict[str, Any]) -> None:
    for _ in train.get_dataset_shard("train").iter_batches(batch_size=1):
        time.sleep(STEP_S)
        train.report({})
        if not goes_on(config):
            return


def reduces(config: dict[str, Any]) -> None:
    """Ranks wait for each other in a collective of torch's, where nobody sees it."""
    import torch
    import torch.distributed as dist

    stop = torch.zeros(1)
    while not stop.item():
        # Computes throughout: what it doesn't compute may be waiting for the other rank.
        compute(STEP_S + (MORE_S if is_slow(config) else 0.0))
        stop = torch.tensor([float(Path(config["until"]).exists())])
        dist.all_reduce(stop)
        train.report({})


def shares_its_processor(config: dict[str, Any]) -> None:
    """One rank has something beside it that gets nearly all of the processor that both must share."""
    if train.get_context().get_world_rank() == config["rank"]:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        subprocess.Popen([sys.executable, "-c", "while True: pass"])  # ends with this worker
        os.nice(19)
    while goes_on(config):
        time.sleep(STEP_S)
        compute(0.002)
        train.report({})


def even(config: dict[str, Any]) -> None:
    for _ in range(60):
        time.sleep(STEP_S / 2)
        compute(0.005)
        train.collective.barrier()
        train.report({})
