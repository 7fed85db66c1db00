"""An agent that is tied to whoever started it, as on a Ray node: one at a time, and gone with all it had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.agent.host import READY
from everstep.agent.sockets import SOCKET
from everstep.process import kernel
from processes import LIMIT_S, alive, wait_for


class Tied:
    """What an actor starts, and how."""

    def __init__(self, base: Path, name: str) -> None:
        self.folder = base / name
        self.folder.mkdir()
        self.lock = base / "lock"
        me = os.getpid()
        command = ["-P", "-m", "everstep.agent", name, str(self.folder), str(me)]
        self.process = subprocess.Popen(
            [sys.executable, *command, str(kernel.start_time(me) or 0), str(self.lock)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def listens(self) -> bool:
        try:
            return (self.folder / READY).read_text() == str(self.process.pid)
        except FileNotFoundError:
            return False

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(LIMIT_S)


@pytest.fixture
def base() -> Iterator[Path]:
    short = Path(f"/tmp/tied-{os.getpid()}")  # sockets have short names
    short.mkdir()
    yield short
    short.rmdir()


def test_it_goes_with_its_owners_end_of_the_pipe_and_leaves_nothing(base: Path) -> None:
    tied = Tied(base, "one")
    wait_for(tied.listens, "the agent, under the pid of the process that was started")
    assert (tied.folder / SOCKET).exists()
    tied.let_go()
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("how", ["let go", "killed"])
def test_the_next_one_waits_until_nothing_is_left_of_the_one_before(base: Path, how: str) -> None:
    first = Tied(base, "one")
    wait_for(first.listens, "the first agent")
    second = Tied(base, "two")
    (agent,) = [pid for pid, _ in kernel.children_of(first.process.pid)]
    assert not second.listens()
    if how == "let go":
        first.let_go()
    else:
        os.kill(agent, signal.SIGKILL)
        first.process.wait(LIMIT_S)
    wait_for(second.listens, "the second agent")
    assert not alive(agent)
    assert not first.folder.exists()
    second.let_go()
    assert list(base.iterdir()) == []
