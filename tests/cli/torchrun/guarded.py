import argparse
import logging
import os
import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger("guarded")


@dataclass
class Options:
    epochs: int
    lr: float
    save_to: str


def parse() -> Options:
    parser = argparse.ArgumentParser(description="A classifier, trained with a sampler and epochs.")
    parser.add_argument("--epochs", type=int, default=int(os.environ.get("STEPS", 10)))
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save-to", default="guarded.pt")
    given = parser.parse_args()
    return Options(given.epochs, given.lr, given.save_to)


@record
def main(options: Options) -> None:
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    random.seed(0)
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    first = 0
    if os.path.exists(options.save_to):
        saved = torch.load(options.save_to)
        model.module.load_state_dict(saved["model"])
        first = saved["epoch"]
        logger.info("resumed at epoch %d", first)
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()
        time.sleep(0.02)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch + 1}, options.save_to + ".tmp")
            os.replace(options.save_to + ".tmp", options.save_to)
            print(f"step {epoch + 1}", flush=True)
        dist.barrier()
    print(f"final {sum(p.double().sum().item() for p in model.parameters()):.9f}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(parse())
