"""``python -m everstep.agent HOST FOLDER OWNER_PID OWNER_START``: be a host's agent."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from everstep.agent.host import Agent, raise_file_limit


async def _main(host: str, folder: Path, owner: tuple[int, int]) -> None:
    await Agent(host, folder, owner).serve()


if __name__ == "__main__":
    raise_file_limit()
    name, where, pid, started = sys.argv[1:]
    asyncio.run(_main(name, Path(where), (int(pid), int(started))))
