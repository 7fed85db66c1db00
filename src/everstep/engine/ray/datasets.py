"""A ``ray.data.Dataset``, divided among workers by Ray itself (``streaming_split``).

Ray divides it anew for each incarnation of the worker group, and every loop over an iterator is one pass. It
has no position that could be saved: after a restart, the pass begins anew.
"""

from __future__ import annotations

from typing import Any

import ray

from everstep.worker.datasets import DividedElsewhere


class RayDataset(DividedElsewhere):
    """Travels to the workers in the place of the data set."""

    def __init__(self, dataset: Any) -> None:
        # In an actor, since workers come and go, and the number of them changes.
        self._divider = _Divider.remote(dataset)  # type: ignore[attr-defined]
        self._mine: Any = None

    def for_this_worker(self) -> Any:
        if self._mine is None:
            from everstep.training import get_context

            context = get_context()
            divided = self._divider.divide.remote(context.get_attempt(), context.get_world_size())
            self._mine = ray.get(divided)[context.get_world_rank()]
        return self._mine


@ray.remote(num_cpus=0)
class _Divider:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch = 0
        self._iterators: list[Any] = []

    def divide(self, epoch: int, workers: int) -> list[Any]:
        if epoch > self._epoch:
            self._epoch = epoch
            self._iterators = self._dataset.streaming_split(workers, equal=True)
        return self._iterators
