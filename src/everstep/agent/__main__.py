"""``python -m everstep.agent HOST FOLDER OWNER_PID OWNER_START [LOCK]``: be a host's agent.

With ``LOCK``, it is tied to the process that started it: it waits until an earlier agent has given the lock
back, and ends when its standard input does.

Where the kernel lets it, the process that is started becomes the guardian, and the agent is its child.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from everstep.agent import guard
from everstep.agent.host_lock import HostLock
from everstep.process import kernel

_LOCK_S = 60.0


def _stand_guard(folder: str, host_lock: HostLock | None) -> int:
    """Go on as the agent, below a guardian. Gives a descriptor to read from: it says when that is ready."""
    guardian = os.getpid()
    ready, is_ready = os.pipe()
    agent = os.fork()
    if agent:
        os.set_inheritable(is_ready, True)
        lock = []
        if host_lock is not None:
            os.set_inheritable(host_lock.fd, True)
            lock = [str(host_lock.path)]
        # Isolated, and without site packages: it needs none of them.
        command = [sys.executable, "-I", "-S", guard.__file__, str(agent), str(is_ready), folder, *lock]
        os.execv(sys.executable, command)
    os.close(is_ready)
    kernel.die_with_parent(guardian, signal.SIGHUP)
    return ready


def main(name: str, folder: str, owner: tuple[int, int], lock: str | None) -> None:
    host_lock = HostLock(Path(lock)) if lock is not None else None
    if host_lock is not None:
        host_lock.take(_LOCK_S)
    pid = os.getpid()
    ready = _stand_guard(folder, host_lock) if kernel.adopt_orphans() else None
    # From here on there may be two of us: only one needs all that an agent needs.
    import asyncio

    from everstep.agent import descriptors
    from everstep.agent.host import Agent

    descriptors.raise_limit()
    if ready is not None and not os.read(ready, 1):
        sys.exit("the guardian of this agent did not start")

    async def serve() -> None:
        await Agent(name, Path(folder), owner).serve(pid, tied=lock is not None)

    asyncio.run(serve())
    if host_lock is not None and ready is None:
        shutil.rmtree(folder, ignore_errors=True)
        host_lock.give()


if __name__ == "__main__":
    host, where, owner_pid, owner_started, *locks = sys.argv[1:]
    main(host, where, (int(owner_pid), int(owner_started)), locks[0] if locks else None)
