"""Training functions that the end-to-end tests run. In a module of their own, as a user's would be."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import everstep as train


def note(config: dict[str, Any], **facts: Any) -> None:
    """Append a line to this rank's own file: what happened, seen from inside."""
    rank = train.get_context().get_world_rank()
    path = Path(config["notes"]) / f"rank-{rank}.jsonl"
    line = json.dumps(
        {"pid": os.getpid(), "at": time.monotonic(), "epoch": train.get_context().get_epoch(), **facts}
    )
    with path.open("a") as out:
        out.write(line + "\n")


def notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """All notes, by rank."""
    found = {}
    for path in sorted(Path(folder).glob("rank-*.jsonl")):
        rank = int(path.stem.split("-")[1])
        found[rank] = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return found


def restore_step() -> int:
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int((Path(folder) / "step").read_text())


def save_step(step: int) -> train.Checkpoint:
    folder = tempfile.mkdtemp()
    (Path(folder) / "step").write_text(str(step))
    return train.Checkpoint.from_directory(folder)


def steps_without_framework(config: dict[str, Any]) -> int:
    """Count to ``steps``; rank 0 saves every step."""
    start = restore_step()
    context = train.get_context()
    note(config, step=start, restored=True)
    for step in range(start + 1, config["steps"] + 1):
        train.collective.barrier()
        checkpoint = save_step(step) if context.get_world_rank() == 0 else None
        train.report({"step": step}, checkpoint=checkpoint)
        note(config, step=step)
        if config.get("pause_s"):
            time.sleep(config["pause_s"])
    return start


def torch_steps(config: dict[str, Any]) -> int:
    """An all-reduce every step, so that a death breaks everybody's collective; rank 0 saves some steps."""
    import torch
    import torch.distributed as dist

    start = restore_step()
    rank, world = train.get_context().get_world_rank(), train.get_context().get_world_size()
    value = torch.full((64,), float(rank))
    note(config, step=start, restored=True)
    step = start
    until = Path(config["until"])
    while True:
        step += 1
        stop = torch.tensor([1.0 if rank == 0 and until.exists() else 0.0])
        total = value.clone()
        dist.all_reduce(total)
        dist.all_reduce(stop)
        assert total[0].item() == world * (world - 1) / 2
        checkpoint = save_step(step) if rank == 0 and step % config["save_every"] == 0 else None
        train.report({"step": step}, checkpoint=checkpoint)
        note(config, step=step)
        if stop.item():
            return step


def torch_shards(config: dict[str, Any]) -> int:
    """Every rank saves a large part in the background, so that an upload is nearly always under way."""
    import torch
    import torch.distributed as dist

    step = restore_step()
    rank = train.get_context().get_world_rank()
    note(config, step=step, restored=True)
    until = Path(config["until"])
    while True:
        step += 1
        stop = torch.tensor([1.0 if rank == 0 and until.exists() else 0.0])
        dist.all_reduce(stop)
        checkpoint = None
        if step % config["save_every"] == 0:
            checkpoint = save_step(step)
            (Path(checkpoint.path) / f"shard-{rank}").write_bytes(os.urandom(1 << 20) * 16)
        train.report({"step": step}, checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC)
        note(config, step=step)
        if stop.item():
            return step


def jax_steps(config: dict[str, Any]) -> int:
    """The same with JAX: a sum over all processes every step."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    start = restore_step()
    rank, world = train.get_context().get_world_rank(), train.get_context().get_world_size()
    assert jax.process_count() == world
    note(config, step=start, restored=True)
    step = start
    until = Path(config["until"])
    while True:
        step += 1
        mine = jnp.array([float(rank), 1.0 if rank == 0 and until.exists() else 0.0])
        total = multihost_utils.process_allgather(mine).sum(axis=0)
        assert total[0] == world * (world - 1) / 2
        checkpoint = save_step(step) if rank == 0 and step % config["save_every"] == 0 else None
        train.report({"step": step}, checkpoint=checkpoint)
        note(config, step=step)
        if total[1] > 0:
            return step


def elastic_steps(config: dict[str, Any]) -> int:
    """Count, together, until told to stop; rank 0 saves every step, or when asked to."""
    context = train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    step = restore_step()
    facts = {"world": world, "slices": context.get_num_slices(), "slice": context.get_slice_id()}
    note(config, step=step, restored=True, reason=context.get_restart_reason(), **facts)
    until = Path(config["until"])
    while True:
        stop = train.collective.broadcast_from_rank_zero(until.exists())
        if stop:
            return step
        step += 1
        due = config.get("save_every", 1)
        saves = rank == 0 and (train.should_checkpoint() if due == "asked" else step % due == 0)
        train.report({"step": step, "world": world}, checkpoint=save_step(step) if saves else None)
        note(config, step=step, saved=saves, **facts)
        time.sleep(config.get("pause_s", 0.05))


def preemption_steps(config: dict[str, Any]) -> int:
    """Ask for notices at every step, out of step with the other ranks."""
    context = train.get_context()
    step = 0
    note(config, step=step, restored=True, world=context.get_world_size())
    until = Path(config["until"])
    while not until.exists():
        step += 1
        info = train.get_preemption_info()
        train.report({"step": step})
        ranks = list(info.preempted_ranks) if info is not None else None
        note(config, step=step, info=ranks, world=context.get_world_size())
        time.sleep(0.005 * (1 + context.get_world_rank()))
    return step
