"""The state that a rank reports: what is kept of it, and what of that is in storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from everstep.errors import ConfigError, StorageError
from everstep.saved.snapshots import At
from everstep.snapshots.content import InMemory, Restorable
from everstep.snapshots.keeper import HostMemory, Keeper, Taken
from everstep.snapshots.layout import check_same, tree_of
from everstep.storage.checkpoints import Share


class GivenSnapshot(NamedTuple):
    """The snapshot that a worker starts from."""

    at: At
    ranks: int
    """How many took it together."""
    kept: Sequence[At]
    """This one, and others that may still be needed."""


class ReportedState:
    def __init__(
        self,
        epoch: int,
        rank: int,
        world_size: int,
        memory: HostMemory,
        given: GivenSnapshot | None,
        places: Callable[[], dict[str, Any]],
        first_of: Callable[[bytes], bytes],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``given``: what this rank starts from, in the memory of hosts. ``places``: where it is in its data
        sets. ``first_of``: what the first rank gives, at all of them. ``waiting``: entered while this rank
        may wait for others.
        """
        self._epoch = epoch
        self._rank = rank
        self._world_size = world_size
        self._given = given
        self._places = places
        self._first_of = first_of
        self._waiting = waiting
        self._is_checked = False
        self.keeper = Keeper(rank, world_size, memory, () if given is None else given.kept)
        self._turn = 0
        self._latest: tuple[Restorable, int] | None = None
        """What was reported last, until it is on its way to storage."""
        self._newest: Taken | None = None
        """The snapshot of that, if there is one."""
        self.copy_s = 0.0
        """How long the last one took."""

    # ------------------------------------------------------------------ restoring

    def _source(self, given: GivenSnapshot) -> InMemory:
        alike = given.ranks == self._world_size
        return InMemory(
            self._rank,
            [self._rank] if alike else range(given.ranks),
            given.ranks,
            partial(self.keeper.find, given.at),
        )

    def restore(self, state: Restorable) -> int | None:
        """From memory. Returns the step; None: it starts from storage, or from nothing."""
        if self._given is None:
            return None
        source = self._source(self._given)
        state.load(source, self._rank)
        return source.index(source.ranks[0]).step

    def restored_places(self) -> list[tuple[int, dict[str, Any]]] | None:
        """Where in its data sets each rank was, in the snapshot that it starts from: this rank alone, if
        there were as many of them.
        """
        if self._given is None:
            return None
        source = self._source(self._given)
        return [(rank, source.index(rank).places) for rank in source.ranks]

    # ------------------------------------------------------------------ reporting

    def report(
        self, state: Restorable, index: int, step: int | None, *, every: int, due: bool, limit_s: float
    ) -> Taken | None:
        """Take a snapshot, if it is its turn (one report in ``every``; 0: none) and the host's
        memory can have it, or one is due to be written.
        """
        at = At(self._epoch, index)
        number = _checked(state, step)
        if not self._is_checked:
            self._is_checked = True
            mine = tree_of(state.capture().shards)
            check_same(self._rank, mine, self._first_of(mine))
        self._latest, self._newest = (state, number), None
        began = time.monotonic()
        if not every:
            self.keeper.forgo()
        elif (due or index % every == 0) and self._remembers(limit_s):
            began = time.monotonic()
            self._newest = self._take(state, at, number, remember=True)
        if due and self._newest is None:
            self._newest = self._take(state, at, number, remember=False)
        if due:
            self.keeper.complete()  # it is going to be written from memory
        self.copy_s = time.monotonic() - began
        return self._newest

    def _remembers(self, limit_s: float) -> bool:
        with self._waiting():
            return self.keeper.remembers(limit_s)

    def _take(self, state: Restorable, at: At, step: int, *, remember: bool) -> Taken | None:
        return self.keeper.take(state.capture(), at, step, self._places(), remember=remember)

    def is_due(self, turn: int) -> bool:
        """Whether a turn to write has come that has not been taken."""
        due, self._turn = turn != self._turn, turn
        return due

    def unsaved(self, index: int) -> Taken | None:
        """A snapshot of what was reported last, if it isn't on its way to storage."""
        if self._latest is None:
            return None
        if self._newest is not None and self.keeper.has(self._newest):
            return self._newest
        state, step = self._latest
        taken = self._take(state, At(self._epoch, index), step, remember=False)
        self.keeper.complete()
        if taken is None:
            raise StorageError(f"no memory to write it from: {self.keeper.why_not}")
        return taken

    def store(self, taken: Taken, share: Share, *, held: bool) -> None:
        """Write what was reported last to storage, in the background."""
        self._latest = self._newest = None
        self.keeper.store(taken, share, held=held)


def _checked(state: Restorable, step: int | None) -> int:
    if not callable(getattr(state, "capture", None)):
        raise ConfigError(
            f"report(state=…) got a {type(state).__qualname__}",
            "give it an everstep.torch.State(model=…, optimizer=…) or an everstep.jax.State(params=…)",
            "report.state",
        )
    if step is None:
        step = state.steps_done()
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(
            f"report(state=…) got step={step!r}",
            "give the number of the step that is done, or a State with an everstep.data.Stream, which counts "
            "them",
            "report.step",
        )
    return step
