"""Data loaders that are divided among ranks, and that move their batches to a device.

Imports torch: only ``prepare_data_loader`` imports this.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from everstep.errors import ConfigError
from everstep.process.step_times import timed

logger = logging.getLogger("everstep")


def divided(loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """The same loader over this rank's part of the data set."""
    if isinstance(loader.sampler, DistributedSampler) or isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise ConfigError(
            f"prepare_data_loader can't divide a loader with a batch sampler of its own "
            f"({type(loader.batch_sampler).__name__}).",
            "Divide it yourself by rank and world size, and give add_dist_sampler=False; or give the loader "
            "batch_size instead.",
            "prepare_data_loader.data_loader",
        )
    if rank == 0 and not isinstance(loader.sampler, (SequentialSampler, RandomSampler)):
        logger.warning(
            "prepare_data_loader puts a DistributedSampler in place of %s; add_dist_sampler=False keeps it.",
            type(loader.sampler).__name__,
        )
    options: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "drop_last": loader.drop_last,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator if loader.generator is not None else _generator_of(rank),
        "sampler": DistributedSampler(
            loader.dataset,
            num_replicas=world_size,
            rank=rank,
            shuffle=not isinstance(loader.sampler, SequentialSampler),
        ),
    }
    if loader.num_workers > 0:
        options |= {
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    return DataLoader(loader.dataset, **options)


def _generator_of(rank: int) -> torch.Generator:
    """What the loader's processes are seeded from: torch's seed, and the rank, so that ranks which were
    seeded alike (``enable_reproducibility``) still augment their data differently.
    """
    generator = torch.Generator()
    generator.manual_seed((torch.initial_seed() + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63)
    return generator


class LoaderOnDevice(DataLoader):  # type: ignore[misc]
    """A loader whose batches are on a device. With ``auto_transfer`` on a GPU, the next batch is copied in a
    stream of its own while the current one is computed on.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device, auto_transfer: bool) -> None:
        # Not DataLoader.__init__: it is the given loader, with its sampler, seen through a window.
        self.__dict__.update(loader.__dict__)
        self._loader = loader
        self._device = device
        self._stream = torch.cuda.Stream(device) if auto_transfer and device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._stream is None:
            for batch in timed(self._loader):
                yield self._moved(batch)
            return
        following: list[Any] = []
        for batch in timed(self._loader):
            following.append(self._moved(batch))
            if len(following) > 1:
                yield self._ready(following.pop(0))
        for batch in following:
            yield self._ready(batch)

    def _moved(self, item: Any) -> Any:
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            return _on_device(item, self._device, non_blocking=self._stream is not None)

    def _ready(self, batch: Any) -> Any:
        """A batch that the current stream may use: copied, and not freed under it."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in _tensors(batch):
            if tensor.device.type == self._device.type:
                tensor.record_stream(current)
        return batch


def _on_device(item: Any, device: torch.device, *, non_blocking: bool) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device, non_blocking=non_blocking)
    if isinstance(item, Mapping):
        return {key: _on_device(value, device, non_blocking=non_blocking) for key, value in item.items()}
    if isinstance(item, tuple):
        moved = [_on_device(part, device, non_blocking=non_blocking) for part in item]
        return type(item)(*moved) if hasattr(item, "_fields") else tuple(moved)
    if isinstance(item, list):
        return [_on_device(part, device, non_blocking=non_blocking) for part in item]
    return item


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _tensors(part)
