"""Ranks of a group that something else launched, beside the one that keeps the run."""

from __future__ import annotations

import threading
from collections.abc import Callable

from everstep.agent.answers import Answers
from everstep.backend.launched import LaunchedGroup
from everstep.driver.questions import QUESTIONS
from everstep.protocol import framing, worker_messages
from everstep.worker import session as sessions

_HANG_UP_S = 10.0


class LaunchedRankLink:
    """The link of another rank than 0, which torchrun has started."""

    def __init__(self, group: LaunchedGroup) -> None:
        self._group = group
        self._sending = threading.Lock()
        self._answers = Answers()
        self._listener = threading.Thread(target=self._listen, name="everstep-rank-0", daemon=True)
        self.session: sessions.Session | None = None

    def listen(self) -> None:
        self._listener.start()

    def _listen(self) -> None:
        """Until rank 0 has closed the run."""
        for frame in self._group.messages_from_leader():
            for body in framing.Frames().feed(frame):
                match worker_messages.to_worker.decode(body):
                    case worker_messages.Answer() as answer:
                        self._answers.put(answer)
                    case worker_messages.Undriven():
                        return
                    case message if self.session is not None:
                        handle(self.session, message, self.send)
                    case _:
                        pass

    def send(self, frame: bytes) -> None:
        with self._sending:  # the function's thread reports, and the one that uploads
            self._group.send_to_leader(frame)

    def ask(self, what: str, body: bytes, timeout_s: float | None) -> bytes:
        if what not in QUESTIONS:
            return agree(what, body, self._group)
        with self._answers.expected() as question:
            self.send(framing.frame(worker_messages.Question(question.seq, what, body)))
            return question.wait(what, timeout_s)

    def finish(self) -> None:
        """This rank has returned: its function, or what comes after fit(), may need the run's end."""
        self.send(framing.frame(worker_messages.Returned(None)))
        self._listener.join()

    def stop(self) -> None:
        stop_listening(self._group, [self._listener])


def stop_listening(group: LaunchedGroup | None, threads: list[threading.Thread]) -> None:
    """A thread that still waits inside of torch when the interpreter ends takes the process down with it."""
    if group is not None and any(thread.is_alive() for thread in threads):
        group.hang_up()
        for thread in threads:
            thread.join(_HANG_UP_S)


def handle(
    session: sessions.Session, message: worker_messages.AnyToWorker, answer: Callable[[bytes], None]
) -> None:
    match message:
        case worker_messages.CheckpointSettled():
            session.committed(message.index)
        case worker_messages.Propose():
            calls = session.values.proposed(message.number, message.value)
            answer(framing.frame(worker_messages.Counted(message.number, calls)))
        case worker_messages.Agree():
            session.values.agreed(message.number, message.start)
        case _:
            pass


def agree(what: str, body: bytes, group: LaunchedGroup) -> bytes:
    """A collective of the ranks."""
    if what == "broadcast":
        return group.share(body)
    group.barrier()
    return b""
