"""What the kernel is asked to do to processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from everstep.process import kernel

PROCESSES = {1: ("S", 0, 0), 20: ("S", 1, 20), 21: ("S", 20, 20), 22: ("S", 21, 22), 30: ("S", 1, 30)}
"""State, parent and session by pid. The session of process 1 is outside of its container."""


@pytest.mark.parametrize(("sessions", "ended"), [({20}, {20, 21, 22}), ({30, 0}, {30}), ({0}, set())])
def test_sessions_end_with_all_that_is_below_them_and_the_unknown_one_never_does(
    monkeypatch: pytest.MonkeyPatch, sessions: set[int], ended: set[int]
) -> None:
    """A worker that was never forked has no pid: 0."""
    signalled: set[int] = set()
    monkeypatch.setattr(kernel, "_all", lambda: PROCESSES)
    monkeypatch.setattr(kernel, "send_signal", lambda pid, sig: signalled.add(pid))
    assert kernel.kill_sessions(sessions) == len(ended)
    assert signalled == ended


def test_a_killed_process_is_dying_until_its_parent_has_waited_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not kernel.is_dying(process.pid)
        process.send_signal(signal.SIGKILL)
        assert kernel.is_dying(process.pid), "from the signal on, whether or not it has ended"
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert kernel.is_dying(process.pid)
    assert not kernel.is_dying(process.pid), "it is gone"
