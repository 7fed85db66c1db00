"""What is running on this machine that is ours: a test that leaves something over has found a bug."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

# Every process that this pytest process starts, and all that those start, inherits this.
MARK = f"EVERSTEP_TEST_SESSION={os.environ['EVERSTEP_TEST_SESSION']}".encode()

LIMIT_S = 600.0
"""How long a test waits for anything. It ends tests that have failed already, on however busy a machine."""


class _Others:
    """Processes without the mark, which are of others for as long as they live: each is looked at once."""

    def __init__(self) -> None:
        self._mine = _read("/proc/self/environ")
        self._ended = select.poll()
        self._handles: dict[int, int] = {}
        self._pids: dict[int, int] = {}

    def forget_the_ended(self) -> None:
        """Their pids may be anybody's from here on."""
        for handle, _ in self._ended.poll(0):
            self._ended.unregister(handle)
            self._handles.pop(self._pids.pop(handle), None)
            os.close(handle)

    def __contains__(self, pid: int) -> bool:
        if pid in self._handles:
            return True
        try:
            handle = os.pidfd_open(pid)  # before the look: of whom is looked at, or of one that ended
        except ProcessLookupError:
            return True
        environment = _read(f"/proc/{pid}/environ")
        if MARK in environment or self._may_become_ours(pid, environment):
            os.close(handle)
            return MARK not in environment
        self._ended.register(handle, select.POLLIN)
        self._handles[pid] = handle
        self._pids[handle] = pid
        return True

    def _may_become_ours(self, pid: int, environment: bytes) -> bool:
        """It was forked from this process, which has the mark to give and not to read; or it is becoming
        another program just now.
        """
        return environment == self._mine or not (environment or _is_of_the_kernel(pid))


def _is_of_the_kernel(pid: int) -> bool:
    try:
        os.readlink(f"/proc/{pid}/exe")
    except FileNotFoundError:
        return True
    except (ProcessLookupError, PermissionError):
        pass
    return False


def ours() -> dict[int, str]:
    """Live processes that descend from these tests, by pid."""
    found = {}
    _others.forget_the_ended()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid in _others or pid == os.getpid():
            continue
        command = _read(f"/proc/{pid}/cmdline")
        if b"resource_tracker" not in command and alive(pid):
            found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def _read(path: str) -> bytes:
    """What the kernel says of a process; nothing, if it is gone or not ours to ask. Every test looks at all
    of them, so this is quick.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
    finally:
        os.close(descriptor)


_others = _Others()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # gone by itself


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], object], what: str, *, look_s: float = 0.05) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not seen within {LIMIT_S:g} s: {what}"
        time.sleep(look_s)
