import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ["STEPS"])
FOLDER = Path("dcp")


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, saved):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        self.step = saved["step"]


def newest():
    done = [path for path in FOLDER.glob("step-*") if (path / ".metadata").exists()]
    return max(done, key=lambda path: int(path.name.split("-")[1]), default=None)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
state = AppState(model, optimizer)
found = [newest() if rank == 0 else None]
dist.broadcast_object_list(found)
if found[0] is not None:
    dcp.load({"app": state}, checkpoint_id=found[0])
while state.step < STEPS:
    batch = torch.Generator().manual_seed(1000 * state.step + rank)
    x = torch.randn(4, 8, generator=batch)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state.step += 1
    time.sleep(0.02)
    folder = FOLDER / f"step-{state.step}"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # half of one, from before a kill
    dist.barrier()
    dcp.save({"app": state}, checkpoint_id=folder)
    if rank == 0:
        for old in FOLDER.glob("step-*"):
            if int(old.name.split("-")[1]) < state.step - 1:
                shutil.rmtree(old)
        print(f"step {state.step}", flush=True)
print(f"final {sum(p.double().sum().item() for p in model.parameters()):.9f}", flush=True)
del model, optimizer, state
dist.destroy_process_group()
