"""One agent of a run on a host at a time: the next one waits until the one before it is gone."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_POLL_S = 0.02


class HostLock:
    """A lock that its holder's death gives back. The file goes with the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1

    def take(self, timeout_s: float) -> None:
        """Wait for it. Raises ``TimeoutError``."""
        deadline = time.monotonic() + timeout_s
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == os.stat(self.path).st_ino:
                    self.fd = fd
                    return
            except (BlockingIOError, FileNotFoundError):
                pass  # held by another, or thrown away by one that has just left
            os.close(fd)
            if time.monotonic() > deadline:
                raise TimeoutError(f"another agent of this run still runs on this host ({self.path})")
            time.sleep(_POLL_S)

    def give(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.fd)
