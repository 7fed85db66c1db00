"""A ``DataLoader`` with a place in its pass, for libraries that save and restore what has one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from everstep.errors import ConfigError


class ResumableLoader(DataLoader[Any]):  # type: ignore[misc]
    """A ``DataLoader`` that goes on in the middle of a pass: Lightning saves its place with the model.

    What was trained on is not loaded again, and the rest comes in the same order, with as many workers as
    before. For data sets with a length.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if isinstance(self.dataset, IterableDataset):
            raise ConfigError(
                "ResumableLoader.dataset is an IterableDataset, which can't be entered in the middle.",
                "Give a data set with len(dataset) and dataset[i], or everstep.data.Stream(…).loader().",
                "ResumableLoader.dataset",
            )
        self._taken = 0
        self._passing_over = 0
        self._random: torch.Tensor | None = None
        """The state of torch's generator when the pass began: from it comes the order."""

    @property
    def _index_sampler(self) -> Any:
        """Which samples come in which batch."""
        return _From(super()._index_sampler, self._passing_over)

    def __iter__(self) -> Any:
        if self._random is None:
            self._random = torch.get_rng_state()
        else:
            torch.set_rng_state(self._random)  # the same order again
        self._taken = self._passing_over
        for batch in super().__iter__():
            self._taken += 1
            if self._taken == len(self):  # nobody may ask for more: the next pass has an order of its own
                self._taken, self._passing_over, self._random = 0, 0, None
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the pass, and the order of it."""
        return {"taken": self._taken, "random": self._random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next loop goes on there."""
        self._passing_over, self._random = state["taken"], state["random"]


class _From:
    """A sampler of batches without its first ones."""

    def __init__(self, sampler: Any, passed_over: int) -> None:
        self._sampler = sampler
        self._passed_over = passed_over

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._passed_over, None)

    def __len__(self) -> int:
        return len(self._sampler)
