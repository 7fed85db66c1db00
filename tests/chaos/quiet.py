"""Training in which nothing hangs and nobody is slower, though much looks like it.

``python -m chaos.quiet KIND FOLDER SEED`` trains until FOLDER/until is there.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import everstep as train
from everstep import RunConfig, ScalingConfig, Trainer
from everstep.jax import JaxTrainer

NAME = "quiet"
KINDS = ("plain", "torch", "jax")
_LONG_S = (30.0, 75.0)
"""Much longer than a step, and than what makes a hang of a rank that does nothing."""


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def compile_elsewhere(seconds: float) -> None:
    code = f"import time\nuntil = time.process_time() + {seconds}\nwhile time.process_time() < until: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


def wait_as_all_do(seconds: float) -> None:
    """For data, of which nothing says that it is on its way."""
    time.sleep(seconds)


def upload_slowly(checkpoint: train.Checkpoint, name: str) -> train.Checkpoint:
    time.sleep(_LONG_S[1])
    target = Path(train.get_context().get_storage().experiment_fs_path, "own", name)
    target.mkdir(parents=True, exist_ok=True)
    return train.Checkpoint(str(target))


def steps(config: dict[str, Any]) -> None:
    together = {"plain": _barrier, "torch": _all_reduce, "jax": _gather}[config["kind"]]()
    shared, own = random.Random(config["seed"]), random.Random()
    rank = train.get_context().get_world_rank()
    while not train.collective.broadcast_from_rank_zero(Path(config["folder"], "until").exists()):
        for _ in range(shared.randrange(200, 800)):
            compute(0.01 * own.uniform(0.7, 1.3))
            time.sleep(0.15)
            together()
            train.report({})
        odd, seconds = shared.randrange(4), shared.uniform(*_LONG_S)
        if odd == 0 and rank == 0:
            compute(seconds)  # an evaluation, that the others wait for
        if odd == 1 and rank == 1:
            compile_elsewhere(seconds)
        if odd == 2:
            wait_as_all_do(seconds)
        if odd == 3:
            together()
            with tempfile.TemporaryDirectory() as folder:
                train.report(
                    {},
                    checkpoint=train.Checkpoint(folder) if rank == 0 else None,
                    checkpoint_upload_fn=upload_slowly if rank == 0 else None,
                )
        together()
        train.report({"odd": odd, "seconds": seconds})


def _barrier() -> Callable[[], Any]:
    return train.collective.barrier


def _all_reduce() -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    return lambda: dist.all_reduce(torch.ones(4))


def _gather() -> Callable[[], Any]:
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    return lambda: multihost_utils.process_allgather(jnp.ones(2))


def main() -> None:
    kind, folder, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    trainer: Any = JaxTrainer if kind == "jax" else Trainer
    given = {}
    if kind == "torch":
        from everstep.torch import TorchConfig, TorchTrainer

        trainer, given = TorchTrainer, {"torch_config": TorchConfig(backend="gloo")}
    trainer(
        steps,
        train_loop_config={"kind": kind, "folder": folder, "seed": seed},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=NAME, storage_path=folder),
        **given,
    ).fit()


if __name__ == "__main__":
    main()
