"""Work beside training on the driver's own machine: a process that ends with the driver.

``python -m everstep.engine.local.side_task PARENT``: the work comes on standard input, its result goes to
standard output. What the work prints goes to its log.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from asyncio import subprocess
from pathlib import Path
from typing import BinaryIO

import msgspec

from everstep.engine.base import SideTask, SideTaskDiedError, SideTaskFailedError
from everstep.errors import signal_name
from everstep.process import kernel
from everstep.protocol import framing
from everstep.protocol.script import Script, call

_DONE, _RAISED = b"d", b"r"


async def run_side_task(work: SideTask) -> bytes:
    """Until it is done. Cancelled, it is ended with all that it has started."""
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    with _opened(work.log) as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=work.environment,
            cwd=work.folder or None,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    answer = asyncio.ensure_future(process.stdout.read())
    try:
        try:
            process.stdin.write(msgspec.msgpack.encode((work.code, work.script)))
            await process.stdin.drain()
            process.stdin.close()
        except ConnectionError:
            pass  # it has ended already: the code says how
        code = await process.wait()
    finally:
        # Also what it has started and left behind, which could keep its output open.
        kernel.kill_sessions([process.pid])
        await process.wait()
    found = await answer
    if found[:1] == _DONE:
        return found[1:]
    if found[:1] == _RAISED:
        raise SideTaskFailedError(found[1:].decode(errors="replace"))
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    raise SideTaskDiedError(f"its process {how}; see {work.log}")


def _opened(log: str) -> BinaryIO:
    return Path(log).open("ab")


def main(parent: int) -> None:
    kernel.die_with_parent(parent)
    answer = os.dup(1)
    os.dup2(2, 1)
    code, script = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[bytes, Script])
    try:
        found = _DONE + call(code, script)
    except BaseException as error:  # of the user's function: it may raise anything, and the driver tells it
        traceback.print_exc()
        found = _RAISED + framing.described(error).encode()
    with os.fdopen(answer, "wb") as out:
        out.write(found)


if __name__ == "__main__":
    main(int(sys.argv[1]))
