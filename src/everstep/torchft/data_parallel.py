"""Averaging gradients over replica groups with torchft, so that survivors outlive a peer's death."""

# No `from __future__ import annotations` here: torch looks at the types of the hook's arguments.

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchft.ddp import DistributedDataParallel


class FaultTolerantDDP(DistributedDataParallel):  # type: ignore[misc]
    """torchft's ``DistributedDataParallel``, with a fix for the hook that averages gradients over the groups.

    A group that is killed inside an all-reduce breaks that all-reduce in all others. torchft 0.2.0 notes the
    error, and would skip the step; but its hook then has no future to return, fails an assertion inside
    ``backward()``, and takes the survivors along (seen with gloo). This one returns the gradients as they
    are: torchft's optimizer doesn't step on them. It also leaves the broken process group at once, so that
    peers which wait for others than the dead one see it, too: all are free for the next quorum in
    milliseconds. It goes when torchft's own does the same.

    Args:
        manager: torchft's ``Manager``.
        module: The model, of which every group has a copy.
        kwargs: As for torchft's.
    """

    def __init__(self, manager: Any, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__(manager, module, **kwargs)

    @staticmethod
    def _comm_hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        work.wait()
        averaged = getattr(work.get_future(), "_fut", None)
        if averaged is not None and state.errored() is None:
            return averaged
        state._pg.abort()
        as_it_is: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        as_it_is.set_result(bucket.buffer())
        return as_it_is


def average_gradients(manager: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Average gradients over the groups, in place: for a model that is sharded inside each group.

    Each rank averages its own shards with those of the same rank in the other groups. Call it between
    ``backward()`` and the step of torchft's optimizer. A peer's death is dealt with as by
    ``FaultTolerantDDP``: nobody steps, in none of the group's ranks, and all are free for the next quorum.

    Args:
        manager: torchft's ``Manager``.
        parameters: The model's, in the same order in all groups; plain tensors, or sharded by ``fully_shard``
            or ``parallelize_module``.
    """
    for parameter in parameters:
        grad = None if parameter.grad is None else parameter.grad.detach()
        mine = grad.to_local() if isinstance(grad, DTensor) else grad
        if mine is None or not mine.numel():
            continue  # others have it, in all groups
        # One after the other: what is under way when a peer dies would hold up the next quorum.
        manager.allreduce(mine).wait()
        if manager.errored() is not None:
            manager._pg.abort()
            return
