"""What is running on this machine that is ours: a test that leaves something over has found a bug."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

# Every process that these tests start, and all that those start, inherits this.
MARK = f"EVERSTEP_TEST_SESSION={os.environ.setdefault('EVERSTEP_TEST_SESSION', uuid.uuid4().hex)}".encode()


def ours() -> dict[int, str]:
    """Live processes that descend from these tests, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if MARK in environment and b"resource_tracker" not in command and alive(int(name)):
            found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


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


def wait_for(
    condition: Callable[[], object], what: str, timeout_s: float = 30.0, look_s: float = 0.005
) -> None:
    """Wait until it is true. The limit only ends a test that has already failed."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not seen within {timeout_s:g} s: {what}"
        time.sleep(look_s)
