"""A sharded model with torchft on Everstep: two copies of it, each spread over the two workers of a group.

Kill any of its workers while it runs: its partner, which has only half of a model, is replaced with it. The
other group trains on, and the new one takes its shards from there:

    python examples/torchft_sharded.py --storage_path ~/runs --run_name my-run
"""

import argparse
import os
import tempfile
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchft import Manager, Optimizer, ProcessGroupGloo

import everstep as train
import everstep.torch

GROUP_SIZE = 2


def train_fn_per_worker(config: dict):
    context = train.get_context()
    group, rank = context.get_replica_group_id(), context.get_replica_group_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    # [1] Inside a group: FSDP, over the process group that the function finds. Each rank has half of it.
    fully_shard(model, mesh=init_device_mesh("cpu", (GROUP_SIZE,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])

    # [2] What a rank of a new group gets from the same rank of another: its shards. They are looked up once,
    # since a peer may ask for them while forward() has the whole parameters in their place.
    shards = dict(model.named_parameters())

    def state_dict() -> dict:
        parameters = {name: shard.detach() for name, shard in shards.items()}
        return {"model": parameters, "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    # [3] All groups begin with the same seed. Where they don't, leave init_sync out: the first step then
    # brings every rank the shards of one of them.
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"group_{group}",
        init_sync=False,
    )

    # [4] A checkpoint is for the day on which all of them die. Each rank has a file of its own in it.
    mine = f"shard-{rank}.pt"
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, mine), weights_only=False)
            load_state_dict(saved["state"])
            manager.load_state_dict(saved["manager"])

    stepper = Optimizer(manager, optimizer)
    data = torch.Generator().manual_seed(1000 + context.get_world_rank())
    while manager.current_step() < config["num_steps"]:
        x = torch.randn(32, 8, generator=data)
        stepper.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.cumsum(dim=1))
        loss.backward()  # averages over the ranks of the group
        everstep.torch.average_gradients(manager, shards.values())  # and this one over the groups
        stepper.step()

        step = manager.current_step()
        metrics = {"loss": loss.item(), "step": step, "groups": manager.num_participants()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if step % config["save_every"] == 0:
                saved = {"state": state_dict(), "manager": manager.state_dict()}
                torch.save(saved, os.path.join(folder, mine))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path", type=str, required=True)
    parser.add_argument("--run_name", type=str, required=True)
    parser.add_argument("--num_steps", type=int, default=200)
    args = parser.parse_args()

    trainer = everstep.torch.TorchTrainer(
        train_fn_per_worker,
        train_loop_config={"lr": 1e-2, "num_steps": args.num_steps, "save_every": 20},
        scaling_config=train.ScalingConfig(num_workers=4),
        # [5] Two workers are a replica group: they fail together, and are replaced together.
        torch_config=everstep.torch.TorchftConfig(
            lighthouse_kwargs={"min_replicas": 1}, replica_group_size=GROUP_SIZE, backend="gloo"
        ),
        run_config=train.RunConfig(
            failure_config=train.FailureConfig(max_failures=3),
            storage_path=args.storage_path,
            name=args.run_name,
        ),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f} after {result.metrics['step']} steps, in {result.path}")
