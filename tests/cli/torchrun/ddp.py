import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ["STEPS"])
CHECKPOINT = "ddp.pt"

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
start = 0
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]

for step in range(start, STEPS):
    batch = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 8, generator=batch)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, CHECKPOINT + ".tmp")
        os.replace(CHECKPOINT + ".tmp", CHECKPOINT)
        print(f"step {step + 1}", flush=True)
    dist.barrier()

print(f"final {sum(p.double().sum().item() for p in model.parameters()):.9f}", flush=True)
del model
dist.destroy_process_group()
