"""A stream's steps as global arrays. Imports JAX: only ``Stream.global_arrays`` imports this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy

from everstep.data.plan import MicroPlan, StepPlan
from everstep.data.steps import Micro, Step, weights_of
from everstep.errors import ConfigError

if TYPE_CHECKING:
    from everstep.data.stream import Stream


class GlobalArrays:
    """Steps in which every process has the same number of micro-batches of the same shape.

    ``micro.weights`` is a global array that sums to 1 over a step's micro-batches, so that the gradient of
    ``(losses * micro.weights).sum()``, added up over them, is that of the mean over the step's samples.
    """

    def __init__(self, stream: Stream, sharding: Any) -> None:
        self._stream, self._sharding = stream, sharding

    def __len__(self) -> int:
        return len(self._stream)

    def __iter__(self) -> Iterator[Step]:
        here = self._stream.here()
        if (here.rank, here.world_size) != (jax.process_index(), jax.process_count()):
            raise ConfigError(
                f"The stream is that of rank {here.rank} of {here.world_size}, and this is JAX's process "
                f"{jax.process_index()} of {jax.process_count()}.",
                "Give rank=jax.process_index() and world_size=jax.process_count().",
                "Stream.rank",
            )
        try:
            self._sharding.shard_shape((self._stream.batching.micro_batch * here.world_size,))
        except ValueError as error:
            raise ConfigError(
                f"Micro-batches of {self._stream.batching.micro_batch} samples on {here.world_size} "
                f"processes can't be sharded: {error}",
                "Give a micro_batch that is a multiple of the devices that each process shards it over.",
                "Stream.micro_batch",
            ) from error
        return self._stream.walk(self._stream.plans(even=True), self._micros)

    def _micros(self, plan: StepPlan) -> Iterator[Micro]:
        return map(self._micro, plan.micros)

    def _micro(self, plan: MicroPlan) -> Micro:
        return Micro(plan, jax.tree.map(self._global, self._stream.load(plan)), self._weights)

    def _weights(self, plan: MicroPlan) -> Any:
        weights = weights_of(plan, 1 / jax.process_count())
        return self._global(numpy.asarray(weights, jax.dtypes.canonicalize_dtype(numpy.float64)))

    def _global(self, local: Any) -> Any:
        return jax.make_array_from_process_local_data(self._sharding, numpy.asarray(local))
