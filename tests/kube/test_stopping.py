"""An operator that is told to stop, stops, whatever happens in that moment."""

from __future__ import annotations

import asyncio

import pytest

from everstep.kube.waiting import is_set_within
from processes import LIMIT_S


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_change_that_comes_with_the_end_doesnt_hide_it(turns: int, timeout: float | None) -> None:
    """The loop has so many turns between the change and the end."""

    async def end() -> bool:
        changed = asyncio.Event()
        waiting = asyncio.create_task(forever(changed))
        await asyncio.sleep(0.01)
        changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=LIMIT_S / 10)
        ended = waiting.done()
        waiting.cancel()
        return ended

    async def forever(changed: asyncio.Event) -> None:
        while True:
            await is_set_within(changed, timeout)
            changed.clear()

    assert asyncio.run(end())


def test_what_doesnt_come_in_time_is_told() -> None:
    async def ask(event: asyncio.Event) -> bool:
        return await is_set_within(event, 0.0)

    there = asyncio.Event()
    assert not asyncio.run(ask(there))
    there.set()
    assert asyncio.run(ask(there))
