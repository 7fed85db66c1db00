"""Silence is counted only while this process itself was running."""

from __future__ import annotations

import asyncio
import time

from everstep.deadlines import Deadlines
from everstep.engine.heartbeats import Heartbeats
from processes import LIMIT_S


def test_a_silent_host_is_noticed_and_one_that_speaks_is_not() -> None:
    async def scenario() -> list[str]:
        silent: list[str] = []
        done = asyncio.Event()

        def noticed(host: str, since: float) -> None:
            heartbeats.forget(host)
            silent.append(host)
            done.set()

        heartbeats = Heartbeats(Deadlines(heartbeat_interval_s=0.02, heartbeat_timeout_s=0.2), noticed)
        heartbeats.watch("quiet")
        heartbeats.watch("talks")

        async def talk() -> None:
            while True:
                heartbeats.received("talks")
                await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(talk()), asyncio.create_task(heartbeats.run())]
        await asyncio.wait_for(done.wait(), LIMIT_S)
        for task in tasks:
            task.cancel()
        return silent

    assert asyncio.run(scenario()) == ["quiet"]


def test_time_in_which_we_did_not_run_is_nobody_elses_silence() -> None:
    async def scenario() -> list[str]:
        silent: list[str] = []
        heartbeats = Heartbeats(
            Deadlines(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3),
            lambda host, since: silent.append(host),
        )
        heartbeats.watch("host")
        task = asyncio.create_task(heartbeats.run())
        await asyncio.sleep(0.06)
        time.sleep(1.0)  # noqa: ASYNC251 - the driver was stopped: nothing of it ran
        await asyncio.sleep(0.08)
        task.cancel()
        return silent

    assert asyncio.run(scenario()) == []
