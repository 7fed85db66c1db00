"""Training functions that the end-to-end tests run. In a module of their own, as a user's would be."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import everstep as train
from everstep.backend.torch import TorchBackend
from everstep.process.current import current

PACE_S = 0.05
"""A step takes at least this long: a test that waits for something else leaves the machine to others."""


class BareTorch(TorchBackend):
    """For functions that have no optimizer: what those need takes as long to import as torch itself, on every
    host.
    """

    def preload(self) -> tuple[str, ...]:
        return ("torch", "torch.distributed")


def note(config: dict[str, Any], **facts: Any) -> None:
    """Append a line to this rank's own file: what happened, seen from inside."""
    rank = train.get_context().get_world_rank()
    path = Path(config["notes"]) / f"rank-{rank}.jsonl"
    line = json.dumps(
        {"pid": os.getpid(), "at": time.monotonic(), "epoch": train.get_context().get_attempt(), **facts}
    )
    with path.open("a") as out:
        out.write(line + "\n")


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
        time.sleep(PACE_S)


def stop_together(until: Path, groups: int) -> None:
    """Let all ranks of ``torchft_steps`` stop after the same step, one that all of so many groups took."""
    draft = until.with_suffix(".tmp")
    draft.write_text(str(groups))
    draft.rename(until)


def list_checkpoints(config: dict[str, Any]) -> int:
    """Rank 0 saves, and asks for the list of checkpoints; the others report when told to."""
    if train.get_context().get_world_rank() > 0:
        while not Path(config["until"]).exists():
            time.sleep(PACE_S)
        train.report({"step": 1})
        return 0
    train.report({"step": 1}, checkpoint=save_step(1))
    note(config, step=1)
    return len(train.get_all_reported_checkpoints())


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
        time.sleep(PACE_S)


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
        time.sleep(PACE_S)


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
        time.sleep(config.get("pause_s", 0.2))


def torchft_steps(config: dict[str, Any]) -> str:
    """torchft's loop on a small model, until ``stop_together``. A rank whose name is in ``die`` ends itself
    in the middle of an all-reduce. Gives a digest of the parameters. The ranks of a group have copies, which
    see the same data, or shards.
    """
    import hashlib
    import signal
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from everstep.torch import FaultTolerantDDP, average_gradients

    context = train.get_context()
    group, rank = context.get_replica_group_id(), context.get_world_rank()
    sharded, leads = config.get("sharded", False), context.get_replica_group_rank() == 0
    own = f"state-{context.get_replica_group_rank()}.pt"
    until, die = Path(config["until"]), Path(config["notes"]) / f"die-{rank}"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    parameters = dict(model.named_parameters())

    def state_dict() -> dict[str, Any]:
        mine = {name: parameter.detach() for name, parameter in parameters.items()}
        return {"model": mine, "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    class Dying(Manager):  # type: ignore[misc]
        def allreduce(self, *args: Any, **kwargs: Any) -> Any:
            work = super().allreduce(*args, **kwargs)
            if die.exists():
                die.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return work

    manager = Dying(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"group_{group}",
        hostname="localhost",
        init_sync=dist.get_world_size() == 1,  # else copies inside a group differ from the first step on
    )
    start = restore_step()
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / own, weights_only=False)
        load_state_dict(saved["state"])
        manager.load_state_dict(saved["manager"])
    replicated = model if sharded else FaultTolerantDDP(manager, model)
    stepper = Optimizer(manager, optimizer)
    data = torch.Generator().manual_seed(rank if sharded else group)
    note(config, step=start, restored=True, generation=current("test").spec.generation)
    told, last = nn.Parameter(torch.zeros(1)), Path(config["notes"]) / f"last-{group}"

    def told_to_stop() -> bool:
        """Asked as a part of the step: all leaders who take it get the same answer."""
        told.grad = torch.tensor([float(until.exists())])
        average_gradients(manager, [told])
        return told.grad.item() > 0

    while True:
        before = manager.current_step()
        x = torch.randn(32, 16, generator=data)
        stepper.zero_grad()
        nn.functional.mse_loss(replicated(x), x.sum(dim=1, keepdim=True)).backward()
        if sharded:
            average_gradients(manager, parameters.values())
        if leads and told_to_stop():
            last.write_text(str(before))  # for its partners, who commit no step without it
        stepper.step()
        step, together = manager.current_step(), manager.num_participants()
        saved_here = None
        if config.get("save_every") and step % config["save_every"] == 0:
            saved_here = save_step(step) if leads else train.Checkpoint.from_directory(tempfile.mkdtemp())
            torch.save({"state": state_dict(), "manager": manager.state_dict()}, Path(saved_here.path) / own)
        train.report({"step": step, "pid": os.getpid(), "together": together}, checkpoint=saved_here)
        note(config, step=step, together=together)
        is_last = last.exists() and last.read_text() == str(before)
        # A group that is slow is left out of a step, and catches up at a later one.
        if is_last and step > before and together == int(until.read_text()):
            break
        time.sleep(2 * PACE_S)  # a step of torchft's takes several processes to agree
    manager.shutdown(wait=False)
    digest = hashlib.sha256()
    for parameter in parameters.values():
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(mine.detach().numpy().tobytes())
    note(config, step=manager.current_step(), digest=digest.hexdigest())
    return digest.hexdigest()


def independent_steps(config: dict[str, Any]) -> int:
    """Each replica group counts for itself, its members together; its leader saves some steps."""
    context = train.get_context()
    step = restore_step()
    note(config, step=step, restored=True, group=context.get_replica_group_id())
    until = Path(config["until"])
    while not train.collective.broadcast_from_rank_zero(until.exists()):
        step += 1
        saves = context.get_replica_group_rank() == 0 and step % config["save_every"] == 0
        train.report({"step": step, "pid": os.getpid()}, checkpoint=save_step(step) if saves else None)
        note(config, step=step, together=context.get_num_replica_groups())
        time.sleep(PACE_S)
    return step


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
