"""``python -m everstep.agent HOST FOLDER OWNER_PID OWNER_START [LOCK]``: be a host's agent.

With ``LOCK``, it is tied to the process that started it: it waits until an earlier agent has given the lock
back, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from everstep.agent.host import Agent, raise_file_limit
from everstep.agent.turn import Turn

_TURN_S = 60.0


async def _main(host: str, folder: Path, owner: tuple[int, int], tied: bool) -> None:
    await Agent(host, folder, owner, tied).serve()


if __name__ == "__main__":
    raise_file_limit()
    name, where, pid, started, *lock = sys.argv[1:]
    turn = Turn(Path(lock[0])) if lock else None
    if turn is not None:
        turn.take(_TURN_S)
    asyncio.run(_main(name, Path(where), (int(pid), int(started)), bool(lock)))
    if turn is not None:
        shutil.rmtree(where, ignore_errors=True)
        turn.give()
