"""Questions that a process has asked and that are not answered yet."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from everstep.errors import CollectiveError
from everstep.protocol import worker_messages


@dataclass(frozen=True)
class OpenQuestion:
    seq: int
    box: queue.SimpleQueue[worker_messages.Answer] = field(default_factory=queue.SimpleQueue)

    def wait(self, what: str, timeout_s: float | None) -> bytes:
        """The answer. Raises ``TimeoutError`` if there is none in time, and what it says went wrong."""
        try:
            answer = self.box.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{what}: no answer within {timeout_s} s") from None
        if answer.error:
            raise CollectiveError(answer.error)
        return answer.body


class Answers:
    """Asked by any thread, answered by the one that listens."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, OpenQuestion] = {}

    @contextmanager
    def expected(self) -> Iterator[OpenQuestion]:
        """A new question, which can be answered until the end of the context."""
        question = OpenQuestion(next(self._numbers))
        self._open[question.seq] = question
        try:
            yield question
        finally:
            self._open.pop(question.seq, None)

    def put(self, answer: worker_messages.Answer) -> None:
        question = self._open.get(answer.seq)
        if question is not None:  # else nobody waits for it any more
            question.box.put(answer)
