"""What is running on this machine that is ours: a test that leaves something over has found a bug."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

# Every process that this pytest process starts, and all that those start, inherits this.
MARK = f"EVERSTEP_TEST_SESSION={os.environ['EVERSTEP_TEST_SESSION']}".encode()

LIMIT_S = 600.0
"""How long a test waits for anything. It ends tests that have failed already, on however busy a machine."""


def ours() -> dict[int, str]:
    """Live processes that descend from these tests, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or MARK not in _read(f"/proc/{name}/environ") or int(name) == os.getpid():
            continue
        command = _read(f"/proc/{name}/cmdline")
        if b"resource_tracker" not in command and alive(int(name)):
            found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
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
