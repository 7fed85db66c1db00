"""How the engine waits for Ray: on threads, and again for what must not end because it failed once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_THREADS = 32
_SLOWEST = 40
"""Times the usual pause, while it goes on failing."""

Given = TypeVar("Given")


class OffLoop:
    """Calls that wait for Ray's control store wait on a thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="everstep-ray")

    def __call__(self, work: Callable[..., Given], *args: Any) -> asyncio.Future[Given]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


async def keep_doing(
    what: str,
    body: Callable[[], Awaitable[None]],
    pause: Callable[[], float],
    say: Callable[[str], None],
) -> None:
    """Do it, wait, do it again. A failure is reported, once until it works again, and changes nothing else.

    Only for work that reads everything anew each time, so that one time more or less makes no difference.
    When its control store is away, Ray's calls raise errors of many kinds, so all are treated alike.
    """
    failures = 0
    while True:
        await asyncio.sleep(pause() * min(2**failures, _SLOWEST))
        try:
            await body()
        except Exception as error:
            if not failures:
                say(f"{what} failed ({describe(error)}); it is tried again")
            failures += 1
        else:
            if failures:
                say(f"{what} works again")
            failures = 0


def describe(error: BaseException) -> str:
    """One line: the kind of error, and the end of its message, where the cause is."""
    text = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {text[-1].strip()}" if text else name
