"""``Stream``: the samples of a source in one order, in steps of one size, on any number of ranks.

It has a place, which moves when a step is finished and is saved with the training state. What is loaded ahead
of it, by whom and on how many ranks doesn't move it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from everstep.data.arguments import seed_of, truth, whole_number
from everstep.data.batch import micro_batches_in
from everstep.data.cursor import Fingerprint, decoded, encoded
from everstep.data.errors import DataError
from everstep.data.group import given_rank, rank_here, warn_of_idle_ranks
from everstep.data.lanes import SequencedFeed, Sequencing, refuse_large_states
from everstep.data.plan import Batching, IndexedFeed, MicroPlan, Rank, StepPlan, StreamPlace
from everstep.data.randomness import seeded
from everstep.data.sequence import Shards
from everstep.data.sources import Collate, collated, identity_of, length_of, plain, samples_of, stacked
from everstep.data.steps import Micro, Step
from everstep.errors import ConfigError
from everstep.process.step_times import loading, timed

if TYPE_CHECKING:
    from everstep.data.jax_arrays import GlobalArrays
    from everstep.data.torch_loader import Loader

_CHANGES = ("length", "shards", "seed", "shuffle", "global_batch", "micro_batch", "source", "window", "lanes")


class Stream:
    """Exactly-once samples with a fixed global batch.

    Args:
        source: A map-style data set (``len(source)``, ``source[i]``), a number of samples, or ``Shards``.
        global_batch: Samples of one optimizer step, over all ranks.
        micro_batch: Samples that are computed on at once. The unit that is dealt to ranks, so at most
            ``global_batch`` divided by the largest number of ranks keeps all of them busy.
        seed: Of the order, and of ``micro.seed``.
        epochs: Passes over the source. ``None``: without end.
        shuffle: ``False``: in the order of the source.
        drop_last: Leave out the samples at the very end that don't fill a step. By default the last step is
            smaller, and its gradient is the mean over what it has. Passes follow each other without a gap.
        even: Give each rank equally many micro-batches of the same shape, padded with weight 0. For programs
            that must be the same on all ranks: FSDP, JAX.
        window: Shards only: how many samples are read ahead and shuffled.
        lanes: Shards only: how many virtual shards are read side by side. With 1 every rank reads every
            shard, and drops what isn't its own; with more, ranks read only the lanes of their micro-batches,
            ``epochs`` must be ``None``, and ``state_dict()`` has the rank's own lanes.
        collate_fn: Makes a batch of a list of samples. By default arrays and numbers are stacked.
        name: Tells this source from others, in place of what is found out about it.
        accept_changes: Fields that may differ from the saved stream's at a resume (``"global_batch"``, …).
        rank, world_size: Of the ranks that share the data. By default the run's.
    """

    def __init__(
        self,
        source: Any,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        epochs: int | None = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        even: bool = False,
        window: int = 1024,
        lanes: int = 1,
        collate_fn: Collate | None = None,
        name: str | None = None,
        accept_changes: Iterable[str] = (),
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        global_batch = whole_number("Stream.global_batch", global_batch)
        micro_batch = min(whole_number("Stream.micro_batch", micro_batch), global_batch)
        window, lanes = whole_number("Stream.window", window), whole_number("Stream.lanes", lanes)
        epochs = None if epochs is None else whole_number("Stream.epochs", epochs)
        seed, shuffle = seed_of(seed), truth("Stream.shuffle", shuffle)
        drop_last, even = truth("Stream.drop_last", drop_last), truth("Stream.even", even)
        self.given_rank = given_rank(rank, world_size)
        self.source = source = plain(source)
        self.batching = Batching(global_batch, micro_batch, drop_last, even)
        self._collate = stacked if collate_fn is None else collate_fn
        self._accepted = _known_changes(accept_changes)
        self._place = StreamPlace()
        self._turn = 0
        self._feed: IndexedFeed | SequencedFeed
        common = {"seed": seed, "shuffle": shuffle, "global_batch": global_batch}
        if isinstance(source, Shards):
            how = Sequencing(seed, shuffle, window, lanes, epochs)
            _check_lanes(source, how, micro_batches_in(global_batch, micro_batch))
            self._feed = SequencedFeed(source, how)
            own: dict[str, int | str] = {"shards": len(source), "window": window, "lanes": lanes}
            if lanes > 1:  # then it decides which samples a step has
                own["micro_batch"] = micro_batch
        else:
            self._feed = IndexedFeed(length_of(source), seed, shuffle, epochs)
            own = {"length": self._feed.length}
        self.fingerprint: Fingerprint = {**own, **common, "source": identity_of(source, name)}

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Step]:
        """Steps from the place on. Samples are loaded in this process, a micro-batch at a time."""
        return self.walk(self.plans(), lambda plan: map(self._loaded, plan.micros))

    def __len__(self) -> int:
        """How many steps the stream has from its beginning to its end."""
        steps = self._feed.steps(self.batching)
        if steps is None:
            raise TypeError("a stream without end, or of shards, has no length")
        return steps

    def loader(self, dataset: Any = None, **options: Any) -> Loader:
        """The same steps, loaded by processes of a torch ``DataLoader``.

        Args:
            dataset: The data set to load from, if it isn't the source itself. As long as the source.
            options: ``num_workers``, ``collate_fn``, ``pin_memory``, ``prefetch_factor`` and what else a
                ``DataLoader`` takes, except for what says which samples come when.
        """
        from everstep.data.torch_loader import Loader

        return Loader(self, dataset, options)

    def global_arrays(self, sharding: Any) -> GlobalArrays:
        """The same steps for JAX: every part of a batch as one array over all processes, sharded along its
        first axis as ``sharding`` says, and ``micro.weights`` as well.
        """
        from everstep.data.jax_arrays import GlobalArrays

        return GlobalArrays(self, sharding)

    # ------------------------------------------------------------------ the place

    def state_dict(self) -> dict[str, Any]:
        """The place, as plain values: 256 bytes at most as JSON (of shards, about 200 and the reader's).

        It is that after the last finished step. A step is finished when its micro-batches have been gone
        through, so at the end of the loop's body it counts, and inside of its micro-batches it doesn't.
        """
        refuse_large_states(dict(self._place.lanes))
        return encoded(self._place, self.fingerprint)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go to a saved place. A stream of another source, seed or batch is refused, naming the field.

        Args:
            state: What ``state_dict()`` returned, on any rank of any number of ranks. With ``lanes``, the
                list of what it returned on all ranks.
        """
        states = state if isinstance(state, (list, tuple)) else [state]
        self._place = decoded(states, self.fingerprint, self._accepted)
        self._turn += 1

    @property
    def step(self) -> int:
        """How many steps are finished."""
        return self._place.step

    # ------------------------------------------------------------------ for loaders

    def here(self) -> Rank:
        return self.given_rank or rank_here()

    def plans(self, **changes: Any) -> Iterator[StepPlan]:
        """What this rank's steps will be from the place on, batched with changes. Moves nothing."""
        here, batching = self.here(), replace(self.batching, **changes)
        warn_of_idle_ranks(here, micro_batches_in(batching.global_batch, batching.micro_batch))
        return self._feed.plans(self._place, here, batching)

    def walk(
        self, plans: Iterator[StepPlan], loaded: Callable[[StepPlan], Iterator[Micro]]
    ) -> Iterator[Step]:
        """Steps as they are asked for; the place follows."""
        self._turn += 1
        return self._steps(self._turn, plans, loaded)

    def _steps(
        self, turn: int, plans: Iterator[StepPlan], loaded: Callable[[StepPlan], Iterator[Micro]]
    ) -> Iterator[Step]:
        for plan in timed(plans):
            step = Step(plan, loaded(plan), lambda plan=plan: self._finish(turn, plan))  # type: ignore[misc]
            yield step
            step.close()  # the next one has been asked for

    def _finish(self, turn: int, plan: StepPlan) -> None:
        if turn != self._turn:
            raise DataError(
                f"The stream was moved, or gone through anew, during step {plan.number}.",
                "Call load_state_dict before the loop, and go through a stream with one loop at a time.",
            )
        self._place = plan.end

    def load(self, plan: MicroPlan) -> Any:
        """A micro-batch, loaded here, with the generators of random numbers seeded for it."""
        if isinstance(self.source, int):  # nothing is loaded, and nothing can be random in it
            return collated(list(plan.ids), plan.ids, self._collate)
        with loading(), seeded(plan.seed):
            samples = samples_of(self.source, plan.ids) if plan.samples is None else list(plan.samples)
            return collated(samples, plan.ids, self._collate)

    def _loaded(self, plan: MicroPlan) -> Micro:
        return Micro(plan, self.load(plan))


def _known_changes(fields: Iterable[str]) -> frozenset[str]:
    accepted = frozenset([fields] if isinstance(fields, str) else fields)
    unknown = sorted(accepted - set(_CHANGES))
    if unknown:
        raise ConfigError(
            f"Stream.accept_changes names {unknown[0]!r}.",
            f"It takes: {', '.join(_CHANGES)}.",
            "Stream.accept_changes",
        )
    return accepted


def _check_lanes(shards: Shards, how: Sequencing, micro_batches: int) -> None:
    if len(shards) < how.lanes:
        raise ConfigError(
            f"Stream.source has {len(shards)} shards, expected one or more for each of {how.lanes} lanes.",
            "Give fewer lanes, or more shards.",
            "Stream.lanes",
        )
    if how.lanes > micro_batches:
        raise ConfigError(
            f"Stream.lanes is {how.lanes}, and a step has {micro_batches} micro-batches: the other lanes "
            "would never be read.",
            f"Give lanes={micro_batches} or fewer.",
            "Stream.lanes",
        )
    if how.lanes > 1 and how.epochs is not None:
        raise ConfigError(
            f"Stream.lanes is {how.lanes} with epochs={how.epochs}: lanes end at different steps, which "
            "ranks that don't read them can't know.",
            "Give epochs=None and end the loop after a number of steps, or lanes=1.",
            "Stream.epochs",
        )
