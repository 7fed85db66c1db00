"""What workers ask about the run's checkpoints. They are answered once their own reports are dealt with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from everstep.config import CheckpointConfig
from everstep.control.controller import Controller
from everstep.driver.scores import no_longer_kept
from everstep.errors import EQUALLY_OFTEN
from everstep.journal.history import History, KeptCheckpoint
from everstep.process.clock import Clock
from everstep.protocol import worker_messages
from everstep.storage.store import Store
from everstep.wording import named

QUESTIONS = ("checkpoints", "validated", "newest")
"""What workers may ask. See ``CheckpointQuestions``."""


def all_kept(history: History, config: CheckpointConfig) -> list[KeptCheckpoint]:
    """Every checkpoint that there is: the best last, or the newest where nothing ranks them."""
    going = no_longer_kept(history, config)
    ranked = history.ranked(config.checkpoint_score_attribute, config.checkpoint_score_order)
    return [kept for kept in ranked if kept.ref.folder not in going]


def listing(kept: list[KeptCheckpoint], store: Store) -> bytes:
    """As an answer to a worker."""
    return msgspec.msgpack.encode(
        [
            worker_messages.Listed(
                one.address(store), one.external is not None, one.metrics, one.status.value
            )
            for one in kept
        ]
    )


def newest_of(history: History, store: Store) -> bytes:
    return listing([history.newest] if history.newest is not None else [], store)


@dataclass
class _Question:
    what: str
    upto: int
    """The last report of the rank that asks."""
    since: float
    warned: bool = False
    """That it waits."""


_FUNCTIONS = {
    "checkpoints": "get_all_reported_checkpoints",
    "validated": "get_all_reported_checkpoints",
    "newest": "get_checkpoint",
}


class CheckpointQuestions:
    """``"checkpoints"`` asks for all of them, once those of the reports that the rank has made are committed
    or given up; ``"validated"``, once no validation is to come either. ``"newest"`` asks for the newest, and
    doesn't wait for uploads in the background.
    """

    def __init__(
        self,
        send: Callable[[int, list[int], worker_messages.AnyToWorker], None],
        controller: Controller,
        history: History,
        store: Store,
        config: CheckpointConfig,
        clock: Clock,
    ) -> None:
        self._send = send
        self._controller = controller
        self._history = history
        self._store = store
        self._config = config
        self._clock = clock
        self._open: dict[tuple[int, int], _Question] = {}
        """By rank and number."""

    def ask(self, rank: int, question: worker_messages.Question) -> None:
        upto = msgspec.msgpack.decode(question.body, type=int)
        self._open[rank, question.seq] = _Question(question.what, upto, self._clock.now())
        self.answer()

    def forget(self, rank: int) -> None:
        """Its process is replaced by another one."""
        self._open = {key: question for key, question in self._open.items() if key[0] != rank}

    def unanswered(self, rank: int) -> set[int]:
        return {seq for of, seq in self._open if of == rank}

    def answer(self) -> None:
        """Answer those that need not wait any more."""
        if not self._open:
            return
        due = [key for key, question in self._open.items() if self._is_due(key[0], question)]
        for rank, seq in due:
            body = self._found(self._open.pop((rank, seq)))
            self._send(self._controller.epoch, [rank], worker_messages.Answer(seq, body))

    def warn(self, after_s: float, say: Callable[[str], None]) -> None:
        """Name the ranks that a question has waited for this long, once."""
        for (rank, _), question in self._open.items():
            group = self._controller.group_of(rank)
            if group is None or question.warned or self._clock.now() - question.since <= after_s:
                continue
            behind = group.book.behind(question.upto)
            if behind:
                question.warned = True
                say(
                    f"{_FUNCTIONS[question.what]}() at rank {rank} waits for {named('rank', behind)} to make "
                    f"report {question.upto}. {EQUALLY_OFTEN}"
                )

    def _is_due(self, rank: int, question: _Question) -> bool:
        group, upto = self._controller.group_of(rank), question.upto
        if group is None or not group.book.has_all(upto):
            return False
        if any(k <= upto for k in self._controller.committing(group)):
            return False
        if question.what == "validated" and self._history.pending():
            return False
        return question.what == "newest" or not group.book.is_uploading(upto)

    def _found(self, question: _Question) -> bytes:
        if question.what == "newest":
            return newest_of(self._history, self._store)
        return listing(all_kept(self._history, self._config), self._store)
