"""Programs that tests run on several ranks, each in a process of its own.

Ranks are forked from a process that has imported the framework.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from everstep.process import kernel
from processes import LIMIT_S

NUMBERS = [float(number * number % 37) for number in range(50)]
BATCH = {"global_batch": 20, "micro_batch": 4, "seed": 2, "epochs": 2}


IMPORTS = {"torch": ("torch._dynamo", "torch.distributed.fsdp"), "jax": ("jax.numpy",)}
"""By framework: what ranks need, and import once for all of them."""


def run(name: str, world_size: int, **environment: str) -> list[Any]:
    """What each rank of a program found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "data.programs", name, str(world_size), folder]
        subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=LIMIT_S)
        return [json.loads(Path(folder, f"found-{rank}").read_text()) for rank in range(world_size)]


def gradients_of_torch(rank: int, world_size: int, meeting: str) -> list[list[float]]:
    """The gradient of each step, which for the mean of a step's numbers times a weight is that mean.

    With DDP where ranks have different numbers of micro-batches, with DDP where one has none of its own, and
    with FSDP2, whose forward is a collective, so that ranks must have equally many.
    """
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    replicated = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    sharded = fully_shard(torch.nn.Linear(1, 1, bias=False))
    place = {"rank": rank, "world_size": world_size}
    found = [
        _gradients(replicated, **BATCH, **place),
        _gradients(replicated, **{**BATCH, "micro_batch": 10}, **place),
        _gradients(sharded, **BATCH, **place, even=True),
    ]
    torch.distributed.destroy_process_group()
    return found


def _gradients(model: Any, **options: Any) -> list[float]:
    from everstep.data import Stream

    found = []
    for step in Stream(NUMBERS, **options).loader():
        for micro in step:
            with step.accumulate(model, micro):
                (model(micro.batch[:, None]).mean() * micro.scale).backward()
        (gradient,) = (parameter.grad for parameter in model.parameters())
        found.append(getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)().item())
        model.zero_grad()
    return found


def gradients_of_jax(rank: int, world_size: int, meeting: str) -> list[Any]:
    """The same over global arrays: [gradient, how many samples had weight, shapes] of each step."""
    import jax

    jax.config.update("jax_enable_x64", True)
    if world_size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(_coordinator(rank, meeting), world_size, rank)
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from everstep.data import Stream

    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))

    @jax.jit
    def gradient(weight: Any, numbers: Any, weights: Any) -> Any:
        return jax.grad(lambda weight: (weight * numbers * weights).sum())(weight)

    @jax.jit
    def counted(weights: Any) -> Any:
        return (weights > 0).sum()

    found: list[Any] = []
    stream = Stream(NUMBERS, **BATCH, rank=rank, world_size=world_size)
    for step in stream.global_arrays(sharding):
        total, samples, shapes = jnp.zeros(()), 0, []
        for micro in step:
            total += gradient(jnp.ones(()), micro.batch, micro.weights)
            samples += int(counted(micro.weights))
            shapes.append(micro.batch.shape)
        found.append([float(total), samples, shapes])
    assert gradient._cache_size() == 1
    return found


def refusals_of_jax(rank: int, world_size: int, meeting: str) -> list[str]:
    """What is said of shardings over two processes that don't divide the samples between them."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(_coordinator(rank, meeting), world_size, rank)
    import numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from everstep.data import Stream
    from everstep.errors import ConfigError

    across = Mesh(jax.devices(), ("data",))
    replicated = Mesh(numpy.array(jax.devices()).reshape(world_size, -1), ("model", "data"))
    found = []
    for sharding in (
        NamedSharding(across, PartitionSpec()),
        NamedSharding(replicated, PartitionSpec("data")),
        NamedSharding(replicated, PartitionSpec("data", "model")),
        NamedSharding(Mesh(jax.local_devices(), ("data",)), PartitionSpec("data")),
    ):
        stream = Stream(NUMBERS, **BATCH, rank=rank, world_size=world_size)
        try:
            next(iter(next(iter(stream.global_arrays(sharding)))))
            found.append("taken")
        except ConfigError as error:
            found.append(str(error))
    return found


def _coordinator(rank: int, meeting: str) -> str:
    """An address on loopback that rank 0 chooses."""
    import socket
    import time

    path = Path(meeting)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        path.with_suffix(".new").write_text(address)
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def _fork(name: str, rank: int, world_size: int, folder: str) -> int:
    parent = os.getpid()
    if child := os.fork():
        return child
    code = 1
    try:
        kernel.die_with_parent(parent)
        found = globals()[name](rank, world_size, f"{folder}/meeting")
        Path(folder, f"found-{rank}").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(name: str, world_size: int, folder: str) -> None:
    for module in IMPORTS[name.rpartition("_")[2]]:
        importlib.import_module(module)
    for rank in range(world_size):
        _fork(name, rank, world_size, folder)
    for _ in range(world_size):
        code = os.waitstatus_to_exitcode(os.wait()[1])
        if code:
            sys.exit(1)  # and the others with it


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
