"""Waiting for an event, and for several calls at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable


async def is_set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Not by ``asyncio.wait_for``, which before Python 3.12 forgets that it was cancelled if the event comes
    in the same moment: an operator that is to stop would go on.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def all_of(doing: Iterable[Awaitable[None]]) -> None:
    """Await all of them, also if some fail; then raise the first error that is more than a refusal."""
    for outcome in await asyncio.gather(*doing, return_exceptions=True):
        if outcome is not None:
            raise outcome
