import os
import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = int(os.environ["STEPS"])
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def save(model, optimizer, step):
    state = {
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
        "step": step,
    }
    if dist.get_rank() == 0:
        torch.save(state, "fsdp2.pt.tmp")
        os.replace("fsdp2.pt.tmp", "fsdp2.pt")


def load(model, optimizer):
    saved = torch.load("fsdp2.pt", weights_only=False)
    set_model_state_dict(model, saved["model"], options=LOAD)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=LOAD)
    return saved["step"]


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = load(model, optimizer) if os.path.exists("fsdp2.pt") else 0
    while step < STEPS:
        batch = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(4, 8, generator=batch)
        loss = (model(x) - x[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(0.02)
        save(model, optimizer, step)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        print(f"final {sum(t.double().sum().item() for t in whole.values()):.9f}", flush=True)
    dist.barrier()
    del model, optimizer, whole
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
