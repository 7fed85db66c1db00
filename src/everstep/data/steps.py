"""What a training loop is given: steps, and in each this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

from everstep.data.errors import DataError
from everstep.data.order import folded
from everstep.data.plan import MicroPlan, StepPlan
from everstep.errors import ConfigError


class Micro:
    """A micro-batch: samples that are computed on at once.

    Attributes:
        batch: The samples, as ``collate_fn`` put them together.
        seed: For whatever should be random. Folded from the seed of the stream, the pass and the number of
            the first sample, so it is the same whichever rank computes it.
        last: Whether it is the rank's last one of the step, after which gradients are averaged.
    """

    def __init__(self, plan: MicroPlan, batch: Any, weigh: Callable[[MicroPlan], Any] | None = None) -> None:
        self._plan = plan
        self._weigh = weigh or weights_of
        self.batch = batch
        self.seed = plan.seed
        self.last = plan.last

    @cached_property
    def weights(self) -> Any:
        """What each sample's loss counts in the average over ranks, 0 for padding. Right for every
        micro-batch: ``(losses * micro.weights).sum().backward()``.
        """
        return self._weigh(self._plan)

    @property
    def ids(self) -> list[int]:
        """The numbers of its samples in the source, without padding. If that is read in sequence, their
        numbers in the stream.
        """
        return list(self._plan.ids[: self._plan.real])

    @property
    def seeds(self) -> list[int]:
        """A seed for each sample of the batch, padding included."""
        plan = self._plan
        return [folded(plan.key, epoch, number) for epoch, number in zip(plan.epochs, plan.ids, strict=True)]

    @property
    def scale(self) -> float:
        """What to multiply the *mean* loss of this micro-batch by: ``world_size * samples / global_batch``,
        because averaging gradients over ranks divides by ``world_size``. 0 for padding.
        """
        plan = self._plan
        if 0 < plan.real < len(plan.ids):
            raise ConfigError(
                f"micro.scale is for the mean over a whole micro-batch, and this one has {plan.real} samples "
                f"and {len(plan.ids) - plan.real} of padding.",
                "Weigh each sample's loss: (losses * micro.weights).sum(). Or let micro_batch divide "
                "global_batch, and drop the last, smaller step with drop_last=True.",
                "Micro.scale",
            )
        return plan.weight * plan.real

    @property
    def x(self) -> Any:
        """The first part of a batch of pairs, or ``batch["x"]``."""
        return self._part("x", 0)

    @property
    def y(self) -> Any:
        """The second part of a batch of pairs, or ``batch["y"]``."""
        return self._part("y", 1)

    def _part(self, name: str, at: int) -> Any:
        if isinstance(self.batch, Mapping) and name in self.batch:
            return self.batch[name]
        if isinstance(self.batch, (tuple, list)) and len(self.batch) == 2:
            return self.batch[at]
        raise ConfigError(
            f"micro.{name}: the batch is a {type(self.batch).__name__}, neither a pair nor a mapping with "
            f"{name!r}.",
            "Use micro.batch, which is what collate_fn returned.",
            f"Micro.{name}",
        )


def weights_of(plan: MicroPlan, unit: float = 1.0) -> list[float]:
    return [plan.weight * unit] * plan.real + [0.0] * (len(plan.ids) - plan.real)


class Step:
    """One optimizer step: exactly ``global_batch`` samples over all ranks (fewer only at the end of a stream
    without ``drop_last``).

    Attributes:
        number: From 0, over all passes.
        epoch: The pass that its first sample belongs to.
        samples: How many samples it has over all ranks.
    """

    def __init__(self, plan: StepPlan, micros: Iterator[Micro], finished: Callable[[], None]) -> None:
        self.number = plan.number
        self.epoch = plan.epoch
        self.samples = plan.samples
        self._micros: Iterator[Micro] | None = micros
        self._number_of_micros = len(plan.micros)
        self._finished = finished
        self._over = False

    def __len__(self) -> int:
        """How many micro-batches this rank has in it."""
        return self._number_of_micros

    def __iter__(self) -> Iterator[Micro]:
        """This rank's micro-batches. When they have been gone through, the step counts as finished."""
        if self._micros is None:
            raise DataError(
                f"Step {self.number} has been gone through already.",
                "Keep the micro-batches with list(step) to use them twice.",
            )
        micros, self._micros = self._micros, None
        while (micro := self._next(micros)) is not None:
            yield micro
        self.finish()

    def finish(self) -> None:
        """Count the step as done: ``state_dict()`` then gives the place after it. Needed only where a loop
        doesn't go through all of the micro-batches, or asks for the last with ``next``.
        """
        if not self._over:  # the place doesn't go back
            self._finished()

    def close(self) -> None:
        """The same, for good: the next step has been asked for."""
        self.finish()
        self._over = True

    def _next(self, micros: Iterator[Micro]) -> Micro | None:
        if self._over:
            raise DataError(
                f"Step {self.number} is over: the next one has been asked for, and loading has moved on.",
                "Go through a step's micro-batches before you ask for the next step. To load ahead, use "
                "stream.loader(num_workers=…).",
            )
        return next(micros, None)

    def accumulate(self, model: Any, micro: Micro) -> AbstractContextManager[object]:
        """Compute forward and backward inside: gradients are averaged over ranks at the last micro-batch.

        ``model.no_sync()`` before that, where the model has it (``DistributedDataParallel``); FSDP2's
        ``set_requires_gradient_sync`` where it has that.
        """
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro.last)
        elif not micro.last and hasattr(model, "no_sync"):
            context: AbstractContextManager[object] = model.no_sync()
            return context
        return nullcontext()
