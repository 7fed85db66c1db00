"""A stream's steps, loaded by torch's ``DataLoader``. Imports torch: only ``Stream.loader`` imports this."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from everstep.data.errors import LoaderDiedError, SampleError
from everstep.data.plan import MicroPlan, StepPlan
from everstep.data.randomness import seed_generators, seeded
from everstep.data.sequence import Shards
from everstep.data.sources import Collate, collated, length_of, samples_of
from everstep.data.steps import Micro, Step, weights_of
from everstep.errors import ConfigError
from everstep.process.step_times import loading

if TYPE_CHECKING:
    from everstep.data.stream import Stream

_REFUSED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order")


class Loader:
    """Steps of a stream, loaded ahead. Each ``for`` loop continues from the stream's place."""

    def __init__(self, stream: Stream, dataset: Any, options: dict[str, Any]) -> None:
        for name in _REFUSED:
            if name in options:
                raise ConfigError(
                    f"Stream.loader has no argument {name!r}: the stream says which samples come when.",
                    "Leave it out; global_batch, micro_batch, shuffle and drop_last are the Stream's.",
                    f"Stream.loader.{name}",
                )
        self._stream = stream
        self._dataset = _checked(stream, dataset)
        self._collate: Collate = options.pop("collate_fn", None) or default_collate
        # A loader draws a seed when it starts. Not from the training loop's generator: that would then depend
        # on how often the run was restarted.
        self._options = {"generator": torch.Generator(), **options}

    def __len__(self) -> int:
        return len(self._stream)

    def __iter__(self) -> Iterator[Step]:
        ahead = _Ahead(self._stream.plans())
        loader = DataLoader(
            _Samples(self._dataset, self._collate), batch_sampler=ahead, collate_fn=_as_it_is, **self._options
        )
        delivery = _Delivery(ahead, iter(loader))
        return self._stream.walk(delivery.plans(), delivery.micros)


def _checked(stream: Stream, dataset: Any) -> Any:
    if isinstance(stream.source, Shards):
        raise ConfigError(
            "Stream.loader needs a map-style source, and this one is read in sequence.",
            "Iterate over the stream itself: for step in stream.",
            "Stream.loader",
        )
    if dataset is None:
        return stream.source
    here, promised = length_of(dataset), stream.fingerprint["length"]
    if here != promised:
        raise ConfigError(
            f"Stream.loader got a data set of {here} samples for a stream of {promised}.",
            "Make the Stream from the data set itself, or from its length.",
            "Stream.loader.dataset",
        )
    return dataset


class _Ahead:
    """The batch sampler. It runs ahead of the training loop by what is prefetched, and keeps the plans of the
    steps that are on their way.
    """

    def __init__(self, plans: Iterator[StepPlan]) -> None:
        self._plans = plans
        self.coming: deque[StepPlan] = deque()

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for plan in self._plans:
            self.coming.append(plan)
            for micro in plan.micros:
                yield micro.seed, list(micro.ids)


class _Delivery:
    """Micro-batches as the loader delivers them, in the order of the plans."""

    def __init__(self, ahead: _Ahead, batches: Iterator[Any]) -> None:
        self._ahead = ahead
        self._batches = batches
        self._left = 0
        """Micro-batches of the current step that haven't been taken."""
        self._first: Any = None

    def plans(self) -> Iterator[StepPlan]:
        while True:
            while self._left:  # a loop that left its step early
                self._next()
            try:
                self._first = self._received()
            except StopIteration:
                return
            plan = self._ahead.coming.popleft()
            self._left = len(plan.micros) - 1
            yield plan

    def micros(self, plan: StepPlan) -> Iterator[Micro]:
        for at, micro in enumerate(plan.micros):
            batch = self._first if at == 0 else self._next()
            self._first = None
            if isinstance(batch, SampleError):
                try:
                    raise batch
                finally:
                    # Else the error and this frame keep each other, and with them the loader's processes.
                    del batch
            yield Micro(micro, batch, _weights)

    def _next(self) -> Any:
        self._left -= 1
        return self._received()

    def _received(self) -> Any:
        try:
            with loading():
                return next(self._batches)
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if not _is_of_a_dead_process(error):
                raise
            raise _died(error) from error


def _is_of_a_dead_process(error: Exception) -> bool:
    """torch says so; or a tensor can't be fetched from the process that made it. What a process raises comes
    as «Caught …», and what the data set raises as a value.
    """
    said = str(error)
    return not said.startswith("Caught ") and (
        not isinstance(error, RuntimeError) or "DataLoader worker" in said
    )


def _died(error: Exception) -> LoaderDiedError:
    said = str(error).strip() or type(error).__name__
    return LoaderDiedError(
        f"A process of the loader died: {said}",
        "Often it is out of memory: fewer num_workers or a smaller prefetch_factor need less. The "
        "place in the stream hasn't moved; a restart does the step again.",
    )


def _weights(plan: MicroPlan) -> torch.Tensor:
    return torch.tensor(weights_of(plan), dtype=torch.get_default_dtype())


class _Samples:
    """The data set as the loader's processes see it: a micro-batch at a time, with its seed."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, index: int) -> Any:  # a loader asks for __getitems__
        return self._dataset[index]

    def __getitems__(self, asked: tuple[int, list[int]]) -> Any:
        seed, ids = asked
        if get_worker_info() is None:
            with seeded(seed):
                return self._batch(ids)
        seed_generators(seed)
        return self._batch(ids)

    def _batch(self, ids: list[int]) -> Any:
        try:
            return collated(samples_of(self._dataset, ids), ids, self._collate)
        except SampleError as error:
            # Handed over as a value: torch would make a text of it on its way.
            return error


def _as_it_is(batch: Any) -> Any:
    return batch
