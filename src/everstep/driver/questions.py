"""What workers ask about the run's checkpoints. They are answered once their own reports are dealt with."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from everstep.agent import wire
from everstep.config import CheckpointConfig
from everstep.control.controller import Controller
from everstep.driver.history import History, Kept, to_delete
from everstep.storage.store import Store


def all_kept(history: History, config: CheckpointConfig) -> list[Kept]:
    """Every checkpoint that there is: the best last, or the newest where nothing ranks them."""
    going = to_delete(history, config)
    ranked = history.ranked(config.checkpoint_score_attribute, config.checkpoint_score_order)
    return [kept for kept in ranked if kept.ref.folder not in going]


def listing(kept: list[Kept], run: Store) -> bytes:
    """As an answer to a worker."""
    return msgspec.msgpack.encode(
        [wire.Listed(one.address(run), one.external is not None, one.metrics) for one in kept]
    )


def newest_of(history: History, run: Store) -> bytes:
    return listing([history.newest] if history.newest is not None else [], run)


class CheckpointQuestions:
    """``"checkpoints"`` asks for all of them, once those of the reports that the rank has made are committed
    or given up. ``"newest"`` asks for the newest, and doesn't wait for uploads in the background.
    """

    def __init__(
        self,
        tell: Callable[[int, list[int], wire.AnyToWorker], None],
        controller: Controller,
        history: History,
        run: Store,
        config: CheckpointConfig,
    ) -> None:
        self._tell = tell
        self._controller = controller
        self._history = history
        self._run = run
        self._config = config
        self._open: dict[tuple[int, int], wire.Ask] = {}
        """By rank and number."""

    def ask(self, rank: int, ask: wire.Ask) -> None:
        self._open[rank, ask.seq] = ask
        self.answer()

    def forget(self, rank: int) -> None:
        """Its process is replaced by another one."""
        self._open = {key: ask for key, ask in self._open.items() if key[0] != rank}

    def unanswered(self, rank: int) -> set[int]:
        return {seq for of, seq in self._open if of == rank}

    def answer(self) -> None:
        """Answer those that need not wait any more."""
        if not self._open:
            return
        due = [key for key, ask in self._open.items() if self._is_due(key[0], ask)]
        for rank, seq in due:
            body = self._found(self._open.pop((rank, seq)))
            self._tell(self._controller.epoch, [rank], wire.Answer(seq, body))

    def _is_due(self, rank: int, ask: wire.Ask) -> bool:
        group = self._controller.run.group_of(rank)
        if group is None:
            return False
        upto = msgspec.msgpack.decode(ask.body, type=int)
        if not group.book.has_all(upto) or any(k <= upto for k in self._controller.committing(group)):
            return False
        return ask.what == "newest" or not group.book.is_uploading(upto)

    def _found(self, ask: wire.Ask) -> bytes:
        if ask.what == "newest":
            return newest_of(self._history, self._run)
        return listing(all_kept(self._history, self._config), self._run)
