"""``FaultTolerantDDP``: torchft's data parallel module, whose survivors outlive a peer's death."""

# No `from __future__ import annotations` here: torch looks at the types of the hook's arguments.

from typing import Any

import torch
from torchft.ddp import DistributedDataParallel


class FaultTolerantDDP(DistributedDataParallel):  # type: ignore[misc]
    """torchft's ``DistributedDataParallel``, with the hook cured that averages gradients over the groups.

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
