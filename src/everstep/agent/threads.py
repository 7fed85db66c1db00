"""Threads that stand in the way of a fork.

A forked process has one thread. What the others were doing stays half done in it: a lock that one of them
held is held for ever. So a process with threads that don't know of forks must not be forked.

Pools of numerical libraries do know: importing NumPy, SciPy, PyTorch or JAX starts threads of OpenBLAS, which
end by themselves before a fork (``pthread_atfork``) and are started again when they are needed. So the time
to look is right after a fork.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

_SAFE = frozenset({"jemalloc_bg_thd"})
"""By the names that they give themselves. jemalloc's (in PyArrow, which pandas imports) isn't needed in a
child, and its locks are taken over.
"""
_ENDING_S = 0.1


def why_not_fork() -> str:
    """Call it after a fork, in the parent. Empty: forks of this process are whole."""
    deadline = time.monotonic() + _ENDING_S
    while names := _others():
        # One that has been joined may be on its way out. One that Python knows of is there to stay.
        if threading.active_count() > 1 or time.monotonic() > deadline:
            return (
                f"importing what the training function needs left {len(names)} "
                f"thread{'s' if len(names) > 1 else ''} running ({', '.join(names)}), which a forked process "
                "would lack"
            )
        time.sleep(0.001)
    return ""


def _others() -> list[str]:
    """Names of the threads beside this one that a fork would lose."""
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = []
    for task in Path("/proc/self/task").iterdir():
        tid = int(task.name)
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # it has ended meanwhile
        if tid != threading.get_native_id() and name not in _SAFE:
            found.append(known.get(tid, name))
    return sorted(found)
