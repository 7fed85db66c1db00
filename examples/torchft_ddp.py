"""torchft's data parallel loop on Everstep: four copies of a model, each in a replica group of its own.

Kill any of its workers while it runs: the other three train on, and a new one takes the model from them:

    python examples/torchft_ddp.py --storage_path ~/runs --run_name my-run
"""

import argparse
import os
import tempfile
from datetime import timedelta

import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

import everstep as train
import everstep.torch


def train_fn_per_worker(config: dict):
    context = train.get_context()
    group, leader = context.get_replica_group_id(), context.get_replica_group_rank() == 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])

    def state_dict() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    # [1] The groups meet here before every step. A group that comes back gets its state from one that stayed.
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"group_{group}",
    )

    # [2] A checkpoint is for the day on which all of them die.
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "state.pt"))
            load_state_dict(saved["state"])
            manager.load_state_dict(saved["manager"])

    # [3] Gradients are averaged over the groups that are there; the optimizer steps if all went well.
    replicated = everstep.torch.FaultTolerantDDP(manager, model)
    stepper = Optimizer(manager, optimizer)
    data = torch.Generator().manual_seed(1000 + group)

    while manager.current_step() < config["num_steps"]:
        x = torch.randn(64, 8, generator=data)
        stepper.zero_grad()
        loss = nn.functional.mse_loss(replicated(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        stepper.step()

        step = manager.current_step()
        metrics = {"loss": loss.item(), "step": step, "groups": manager.num_participants()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if leader and step % config["save_every"] == 0:
                saved = {"state": state_dict(), "manager": manager.state_dict()}
                torch.save(saved, os.path.join(folder, "state.pt"))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)
    manager.shutdown(wait=False)
    return [parameter.sum().item() for parameter in model.parameters()]


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
        # [4] Each worker is a replica group: what fails is replaced, while the others train on.
        torch_config=everstep.torch.TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        run_config=train.RunConfig(
            failure_config=train.FailureConfig(max_failures=3),
            storage_path=args.storage_path,
            name=args.run_name,
        ),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f} after {result.metrics['step']} steps, in {result.path}")
