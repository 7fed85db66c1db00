"""Batches as torch tensors. Imports torch: only ``DatasetShard.iter_torch_batches`` imports this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def tensors_of(batch: Any, dtypes: Any, device: Any, pin_memory: bool) -> Any:
    """The batch with a tensor for each array in it."""
    target = _here() if device == "auto" else torch.device(device)
    if isinstance(batch, Mapping):
        return {
            key: _tensor(value, dtypes[key] if isinstance(dtypes, Mapping) else dtypes, target, pin_memory)
            for key, value in batch.items()
        }
    if isinstance(batch, tuple):
        return tuple(_tensor(value, dtypes, target, pin_memory) for value in batch)
    return _tensor(batch, dtypes, target, pin_memory)


def _here() -> torch.device:
    """A worker sees its own accelerators only."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _tensor(value: Any, dtype: Any, device: torch.device, pin_memory: bool) -> torch.Tensor:
    tensor = torch.as_tensor(value, dtype=dtype)
    if pin_memory and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
