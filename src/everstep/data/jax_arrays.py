"""A stream's steps as global arrays. Imports JAX: only ``Stream.global_arrays`` imports this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy

from everstep.data.plan import MicroPlan, Rank, StepPlan
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
        self._check_sharding(here)
        return self._stream.walk(self._stream.plans(even=True), self._micros)

    def _check_sharding(self, here: Rank) -> None:
        micro_batch = self._stream.batching.micro_batch
        total = micro_batch * here.world_size
        try:
            self._sharding.shard_shape((total,))
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"Micro-batches of {micro_batch} samples on {here.world_size} processes can't be sharded by "
                f"{self._sharding}: {error}",
                "Give a micro_batch that is a multiple of the devices that each process shards it over, and "
                "a sharding of the first axis, which the weights have as well: PartitionSpec('data').",
                "Stream.micro_batch",
            ) from error
        held: set[int] = set()
        for device, (rows,) in self._sharding.devices_indices_map((total,)).items():
            if device.process_index == here.rank:
                held |= set(range(*rows.indices(total)))
        if len(held) != micro_batch:
            raise ConfigError(
                f"By {self._sharding}, process {here.rank} holds {len(held)} of {total} samples, expected "
                f"{micro_batch}: each process brings samples of its own, so none may be shared.",
                "Shard the first axis over a mesh axis that divides the devices of all processes.",
                "Stream.global_arrays.sharding",
            )

    def _micros(self, plan: StepPlan) -> Iterator[Micro]:
        return map(self._micro, plan.micros)

    def _micro(self, plan: MicroPlan) -> Micro:
        return Micro(plan, jax.tree.map(self._global, self._stream.load(plan)), self._weights)

    def _weights(self, plan: MicroPlan) -> Any:
        weights = weights_of(plan, 1 / jax.process_count())
        return self._global(numpy.asarray(weights, jax.dtypes.canonicalize_dtype(numpy.float64)))

    def _global(self, local: Any) -> Any:
        return jax.make_array_from_process_local_data(self._sharding, numpy.asarray(local))
