"""Calls into a framework that may never return, made under a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable


def finish_within(seconds: float, action: Callable[[], object]) -> bool:
    """Run ``action`` beside the calling thread. Whether it finished in time; what it raises is raised here.

    The caller's thread stays free for signals. An action that doesn't finish is left behind in a daemon
    thread: the process is about to end anyway.
    """
    finished = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)
        finally:
            finished.set()

    threading.Thread(target=run, name="everstep-deadline-call", daemon=True).start()
    if not finished.wait(seconds):
        return False
    if raised:
        raise raised[0]
    return True
