"""A run's data set as one worker sees it: Ray Train's names, and a place that is saved with checkpoints.

What a training loop was given counts as seen: a checkpoint that it reports then has the place after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from everstep.data.errors import DataError, ResumeRefusedError
from everstep.data.passes import next_shares
from everstep.data.plan import Rank, StepPlan, as_one
from everstep.data.sources import collated, identity_of, length_of, samples_of, stacked
from everstep.data.steps import Micro
from everstep.data.stream import Stream
from everstep.errors import ConfigError

_VERSION = 1
_BATCH_SIZE = 256
"""Ray Data's."""
_ELSEWHERE = "For shuffling give a Stream as the data set: datasets={'train': Stream(source, seed=0, …)}"


class _Way(Protocol):
    """How batches are taken from a data set, and where it is."""

    def batches(self, size: int | None, drop_last: bool) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class DatasetShard:
    """What ``get_dataset_shard()`` gives: this worker's share, a batch at a time.

    Each loop is one pass. The first one after a restart goes on where the checkpoint's left off.
    """

    def __init__(self, name: str, source: Any, here: Rank) -> None:
        self._way: _Way = _Steps(source) if isinstance(source, Stream) else _Passes(name, source, here)

    def iter_batches(
        self,
        *,
        batch_size: int | None = _BATCH_SIZE,
        batch_format: str | None = "default",
        drop_last: bool = False,
        prefetch_batches: int = 1,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> Iterator[Any]:
        """Batches with arrays and numbers stacked: a dict of arrays where samples are dicts, a tuple where
        they are tuples.

        Args:
            batch_size: Samples of a batch on this worker. A Stream has its own: with one, a batch is this
                worker's share of one step.
            batch_format: ``"default"`` or ``"numpy"``.
            drop_last: Leave out what doesn't fill a batch on every worker at the end of a pass.
            prefetch_batches: Ignored: batches are loaded when they are asked for.
            local_shuffle_buffer_size, local_shuffle_seed: Refused; a Stream shuffles.
        """
        self._check(batch_format, local_shuffle_buffer_size, local_shuffle_seed)
        return self._way.batches(batch_size, drop_last)

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = _BATCH_SIZE,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        prefetch_batches: int = 1,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
    ) -> Iterator[Any]:
        """The same with tensors, on the worker's device.

        Args:
            dtypes: One for all tensors, or by name.
            device: ``"auto"``: that of this worker.
            collate_fn: Makes tensors of a batch itself; ``dtypes`` and ``device`` are then its own business.
            pin_memory: Copy to the device from memory that is locked for it.
        """
        from everstep.data.tensors import tensors_of

        self._check("default", local_shuffle_buffer_size, local_shuffle_seed)
        for batch in self._way.batches(batch_size, drop_last):
            if collate_fn is not None:
                yield collate_fn(batch)
            else:
                yield tensors_of(batch, dtypes, device, pin_memory)

    def iter_rows(self) -> Iterator[Any]:
        """This worker's samples, one by one."""
        for batch in self._way.batches(1, False):
            yield from _rows(batch)

    def state_dict(self) -> dict[str, Any]:
        """The place, as ``report(checkpoint=…)`` saves it by itself."""
        return self._way.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._way.load_state_dict(state)

    def _check(self, batch_format: str | None, buffer_size: int | None, seed: int | None) -> None:
        if batch_format not in ("default", "numpy"):
            raise ConfigError(
                f"iter_batches(batch_format={batch_format!r}): batches are arrays.",
                "Leave it out, and convert the batch.",
                "iter_batches.batch_format",
            )
        if buffer_size is not None or seed is not None:
            raise ConfigError(
                "iter_batches(local_shuffle_buffer_size=…) isn't taken: what it does can't be continued in "
                "the middle.",
                f"{_ELSEWHERE}.",
                "iter_batches.local_shuffle_buffer_size",
            )


class _Passes:
    """A map-style data set in its own order, dealt to ranks in batches of the size that a loop asks for."""

    def __init__(self, name: str, source: Any, here: Rank) -> None:
        self._name, self._source, self._here = name, source, here
        self._of = {"length": length_of(source), "source": identity_of(source, None)}
        self._epoch = self._sample = self._loops = 0
        self._left_open = False
        """A loop has begun this pass, and not come to its end."""

    def batches(self, size: int | None, drop_last: bool) -> Iterator[Any]:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"iter_batches(batch_size={size!r}), expected a number of 1 or more.",
                "Give batch_size=32.",
                "iter_batches.batch_size",
            )
        length, ranks = self._of["length"], self._here.world_size
        assert isinstance(length, int)
        if length < ranks:
            raise ConfigError(
                f"The data set {self._name!r} has {length} samples for {ranks} workers.",
                "Give a larger one, or fewer workers.",
                f"Trainer.datasets[{self._name!r}]",
            )
        return self._pass(size, drop_last, length, ranks)

    def _pass(self, size: int, drop_last: bool, length: int, ranks: int) -> Iterator[Any]:
        if self._left_open:  # a loop that was left early has ended its pass
            self._next_pass()
        self._loops += 1
        loop, self._left_open = self._loops, True
        while shares := next_shares(self._sample, length, size, ranks, drop_last=drop_last):
            ids = list(shares[self._here.rank])
            batch = collated(samples_of(self._source, ids), ids, stacked)
            self._sample = shares[-1].stop
            yield batch
            if loop != self._loops:
                raise DataError(
                    f"Another loop over {self._name!r} has begun in the middle of this one.",
                    "Go through a data set with one loop at a time.",
                )
        self._next_pass()

    def _next_pass(self) -> None:
        self._epoch, self._sample, self._left_open = self._epoch + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"version": _VERSION, "epoch": self._epoch, "sample": self._sample, "of": self._of}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = state.get("of", {})
        if state.get("version") != _VERSION or before != self._of:
            raise ResumeRefusedError(
                f"The data set {self._name!r} isn't the one whose place was saved: it was {before}, and is "
                f"{self._of}.",
                "Give the same data set as before, or start a new run.",
                f"Trainer.datasets[{self._name!r}]",
            )
        self._epoch, self._sample, self._left_open = state["epoch"], state["sample"], False


class _Steps:
    """A stream: its steps have one size over all ranks, and a batch is this rank's share of one."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def batches(self, size: int | None, drop_last: bool) -> Iterator[Any]:
        if size not in (None, _BATCH_SIZE) or drop_last:
            raise ConfigError(
                f"iter_batches(batch_size={size!r}, drop_last={drop_last}): the data set is a Stream, which "
                f"has global_batch={self._stream.batching.global_batch} and drop_last of its own.",
                "Leave them out.",
                "iter_batches.batch_size",
            )
        stream = self._stream
        for step in stream.walk(stream.plans(), lambda plan: iter([self._whole(plan)])):
            [micro] = step
            yield micro.batch

    def _whole(self, plan: StepPlan) -> Micro:
        together = as_one(plan.micros)
        return Micro(together, self._stream.load(together))

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state)


def _rows(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from (
            dict(zip(batch, values, strict=True)) for values in zip(*map(list, batch.values()), strict=True)
        )
    elif isinstance(batch, tuple):
        yield from zip(*map(list, batch), strict=True)
    else:
        yield from batch
