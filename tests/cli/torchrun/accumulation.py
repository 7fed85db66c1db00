import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ["STEPS"])
ACCUMULATE = 4


def micro_batches(step, rank):
    batch = torch.Generator().manual_seed(1000 * step + rank)
    for _ in range(ACCUMULATE):
        x = torch.randn(2, 8, generator=batch)
        yield x, x.sum(dim=1, keepdim=True)


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = 0
    if os.path.exists("accumulation.pt"):
        saved = torch.load("accumulation.pt", weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        step = saved["step"]
    while step < STEPS:
        optimizer.zero_grad()
        for i, (x, y) in enumerate(micro_batches(step, rank)):
            last = i == ACCUMULATE - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = torch.nn.functional.mse_loss(model(x), y) / ACCUMULATE
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        time.sleep(0.02)
        if rank == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "step": step,
            }
            torch.save(state, "accumulation.pt.tmp")
            os.replace("accumulation.pt.tmp", "accumulation.pt")
            print(f"step {step}", flush=True)
        dist.barrier()
    print(f"final {sum(p.double().sum().item() for p in model.parameters()):.9f}", flush=True)
    del model
    dist.destroy_process_group()


main()
