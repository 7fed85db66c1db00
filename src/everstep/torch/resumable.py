"""A ``DataLoader`` with a place in its pass, for libraries that save and restore what has one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, pairwise
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
        self._began: torch.Tensor | None = None
        """The state of the generator when the pass began: from it comes the order."""
        self._is_resumed = False

    @property
    def _index_sampler(self) -> Any:
        """Which samples come in which batch."""
        return _From(super()._index_sampler, self._passing_over)

    def __iter__(self) -> Any:
        generator = self.generator or torch.default_generator
        now = generator.get_state()
        if self._is_resumed and self._began is not None:  # the same order again; nothing else is drawn again
            generator.set_state(self._began)
            batches = super().__iter__()
            generator.set_state(now)
        else:
            self._began, self._passing_over = now, 0
            batches = super().__iter__()
        self._is_resumed = False
        self._taken = self._passing_over
        for batch in batches:
            self._taken += 1
            if self._taken == len(self):  # the loop may end here: the next pass has an order of its own
                self._taken, self._passing_over, self._began = 0, 0, None
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the pass, and the order of it; and of the passes to come, if the loader has a
        generator of its own.
        """
        own = self.generator.get_state() if self.generator is not None else None
        return {"taken": self._taken, "random": self._began, "generator": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next loop goes on there."""
        self._passing_over, self._began = state["taken"], state["random"]
        self._is_resumed = True
        if self.generator is not None and state.get("generator") is not None:
            self.generator.set_state(state["generator"])


class _From:
    """A sampler of batches without its first ones. It is one batch ahead, so that the order is drawn at once,
    and a sampler that draws random numbers at its end draws them before the last batch is used.
    """

    def __init__(self, sampler: Any, passed_over: int) -> None:
        self._sampler = sampler
        self._passed_over = passed_over

    def __iter__(self) -> Iterator[Any]:
        batches = islice(iter(self._sampler), self._passed_over, None)
        return _one_ahead([*islice(batches, 1)], batches)

    def __len__(self) -> int:
        return len(self._sampler)


def _one_ahead(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    for batch, _ in pairwise(chain(first, rest, [None])):
        yield batch
