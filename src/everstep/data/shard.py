"""A run's data set as one worker sees it: Ray Train's names, and a place that is saved with checkpoints.

A batch counts as seen once the training loop has it: a checkpoint that is reported then has the place after
it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from everstep.data.arguments import index_of, whole_number
from everstep.data.batch import micro_batches_in
from everstep.data.errors import DataError, ResumeRefusedError
from everstep.data.passes import next_shares
from everstep.data.plan import Rank, StepPlan, as_one
from everstep.data.sources import Collate, collated, identity_of, length_of, samples_of, stacked
from everstep.data.steps import Micro
from everstep.data.stream import Stream
from everstep.errors import ConfigError
from everstep.process.step_times import loading

_VERSION = 1
_BATCH_SIZE = 256
"""Ray Data's."""
_ELSEWHERE = "For shuffling give a Stream as the data set: datasets={'train': Stream(source, seed=0, …)}"


class _Access(Protocol):
    """How batches are taken from a data set, and the place in it."""

    def batches(self, size: int | None, drop_last: bool) -> Iterator[Any]: ...

    def rows(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


class DatasetShard:
    """What ``get_dataset_shard()`` gives: this worker's share, a batch at a time.

    Each loop is one pass. The first one after a restart goes on where the checkpoint's left off.
    """

    def __init__(self, name: str, source: Any, here: Rank) -> None:
        self._access: _Access = _Steps(source) if isinstance(source, Stream) else _Passes(name, source, here)

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
        return self._access.batches(batch_size, drop_last)

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
            collate_fn: Makes tensors of a batch itself; ``dtypes`` and ``device`` are then ignored.
            pin_memory: Copy to the device from memory that is locked for it.
        """
        from everstep.data.tensors import tensors_of

        self._check("default", local_shuffle_buffer_size, local_shuffle_seed)
        for batch in self._access.batches(batch_size, drop_last):
            if collate_fn is not None:
                yield collate_fn(batch)
            else:
                yield tensors_of(batch, dtypes, device, pin_memory)

    def iter_rows(self) -> Iterator[Any]:
        """This worker's samples, one by one, as they are in the data set."""
        return self._access.rows()

    def state_dict(self) -> dict[str, Any]:
        """The place, as ``report(checkpoint=…)`` saves it by itself."""
        return self._access.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go to a place: what ``state_dict()`` gave, or a list of what it gave on several workers."""
        self._access.load_state_dict(state)

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
        return self._pass(whole_number("iter_batches.batch_size", size), drop_last, stacked)

    def rows(self) -> Iterator[Any]:
        return (row for (row,) in self._pass(1, False, list))

    def _pass(self, size: int, drop_last: bool, collate: Collate) -> Iterator[Any]:
        length, ranks = self._of["length"], self._here.world_size
        assert isinstance(length, int)
        if length < ranks:
            raise ConfigError(
                f"The data set {self._name!r} has {length} samples for {ranks} workers.",
                "Give a larger one, or fewer workers.",
                f"Trainer.datasets[{self._name!r}]",
            )
        return self._taken(size, drop_last, collate, length)

    def _taken(self, size: int, drop_last: bool, collate: Collate, length: int) -> Iterator[Any]:
        if self._left_open:  # a loop that was left early has ended its pass
            self._next_pass()
        self._loops += 1
        loop, self._left_open = self._loops, True
        ranks = self._here.world_size
        while shares := next_shares(self._sample, length, size, ranks, drop_last=drop_last):
            ids = list(shares[self._here.rank])
            with loading():
                batch = collated(samples_of(self._source, ids), ids, collate)
            self._sample = max(share.stop for share in shares)
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

    def load_state_dict(self, state: Any) -> None:
        (found, *others) = state if isinstance(state, list) and state else [state]
        if others or not isinstance(found, Mapping) or found.get("version") != _VERSION:
            raise self._refused(f"got {str(state)[:80]}, which isn't its place")
        if found.get("of") != self._of:
            raise self._refused(
                f"isn't the one whose place was saved: it was {found.get('of')}, and is {self._of}"
            )
        epoch, sample = index_of(found.get("epoch")), index_of(found.get("sample"))
        if epoch is None or sample is None or min(epoch, sample) < 0:
            raise self._refused(f"got a broken place: {str(state)[:80]}")
        self._epoch, self._sample, self._left_open = epoch, sample, False

    def _refused(self, what: str) -> ResumeRefusedError:
        return ResumeRefusedError(
            f"The data set {self._name!r} {what}.",
            "Give the same data set as before, or start a new run.",
            f"Trainer.datasets[{self._name!r}]",
        )


class _Steps:
    """A stream: its steps have one size over all ranks, and a batch is this rank's share of one."""

    def __init__(self, stream: Stream) -> None:
        # Its own, since in one process several runs, one after the other, may be handed the same.
        self._stream = copy.copy(stream)

    def batches(self, size: int | None, drop_last: bool) -> Iterator[Any]:
        if size not in (None, _BATCH_SIZE) or drop_last:
            raise ConfigError(
                f"iter_batches(batch_size={size!r}, drop_last={drop_last}): the data set is a Stream, which "
                f"has global_batch={self._stream.batching.global_batch} and drop_last of its own.",
                "Leave them out.",
                "iter_batches.batch_size",
            )
        return self._shares()

    def rows(self) -> Iterator[Any]:
        raise ConfigError(
            "iter_rows(): the data set is a Stream, whose place moves in steps of "
            f"{self._stream.batching.global_batch} samples.",
            "Use iter_batches(), which gives this worker's share of a step.",
            "iter_rows",
        )

    def _shares(self) -> Iterator[Any]:
        """A batch has no weights: a step is shared as evenly as can be, sample by sample, and not in
        micro-batches, of which some workers might have none. Only lanes are read in micro-batches.
        """
        stream, ranks = self._stream, self._stream.here().world_size
        micro_batch = stream.batching.micro_batch if stream.fingerprint.get("lanes", 1) != 1 else 1
        parts = micro_batches_in(stream.batching.global_batch, micro_batch)
        if parts < ranks:
            unit = "samples" if micro_batch == 1 else "micro-batches"
            raise ConfigError(
                f"A step of the Stream has {parts} {unit} for {ranks} workers.",
                "Give a larger global_batch, or fewer workers.",
                "Stream.global_batch",
            )
        for step in stream.walk(
            stream.plans(micro_batch=micro_batch), lambda plan: iter([self._whole(plan)])
        ):
            [micro] = step
            yield micro.batch

    def _whole(self, plan: StepPlan) -> Micro:
        together = as_one(plan.micros)
        return Micro(together, self._stream.load(together))

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._stream.load_state_dict(state)
