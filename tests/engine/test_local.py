"""Hosts on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep import (
    ControllerError,
    Deadlines,
    InfeasibleResourcesError,
    RunConfig,
    ScalingConfig,
    Trainer,
)
from everstep.engine.base import EngineRequest
from everstep.engine.local.cluster import HostFile
from everstep.engine.local.engine import LocalEngine
from everstep.engine.local.link import LocalLink
from everstep.failures import Failure
from everstep.protocol import wire
from everstep.testing import LocalCluster
from everstep.topology.slices import HostId, HostView
from processes import LIMIT_S


def test_what_a_killed_process_left_of_a_host_does_not_stop_the_next(tmp_path: Path) -> None:
    half = tmp_path / "slice-0-host"
    half.mkdir()
    (half / "agent.log").touch()
    with LocalCluster(slices=1, folder=tmp_path) as cluster:
        assert list(cluster.hosts) == ["slice-0-host"]


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        (ScalingConfig(num_workers=1, use_gpu=True), "1 GPU"),
        (ScalingConfig(num_workers=1, resources_per_worker={"license": 2}), "2 license"),
    ],
)
def test_what_virtual_hosts_do_not_have_is_refused(
    tmp_path: Path, scaling: ScalingConfig, wanted: str
) -> None:
    with LocalCluster(slices=1) as cluster:
        trainer = Trainer(
            lambda: None,
            scaling_config=scaling,
            run_config=RunConfig(storage_path=str(tmp_path)),
            engine=cluster,
        )
        with pytest.raises(InfeasibleResourcesError, match=f"each worker needs {wanted}"):
            trainer.fit()


def test_processors_of_virtual_hosts_are_those_of_the_machine(tmp_path: Path) -> None:
    with LocalCluster(slices=1) as cluster:
        Trainer(
            lambda: None,
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=str(tmp_path)),
            engine=cluster,
        ).fit()


class Blinded(LocalEngine):
    """Its watch over the hosts breaks, after the workers have started."""

    async def find_hosts(self) -> None:
        await super().find_hosts()
        if any(link.run for link in self.links.values()):
            raise OSError("too many open files")


def test_an_engine_that_can_not_go_on_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    def wait_for_ever() -> None:
        import threading

        threading.Event().wait()

    trainer = Trainer(
        wait_for_ever,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(tmp_path)),
        engine=Blinded(),
    )
    with pytest.raises(ControllerError, match="too many open files"):
        trainer.fit()


class Listening:
    """A driver that looks at what there is, and does nothing."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._hosts: tuple[HostView, ...] = ()

    def on_capacity(self, hosts: tuple[HostView, ...]) -> None:
        self._hosts = hosts
        self._changed.set()

    def on_lost(self, host: HostId, failure: Failure) -> None:
        pass

    def on_message(self, host: HostId, message: wire.AnyFromAgent) -> None:
        pass

    async def wait_until_usable(self, *hosts: HostId) -> None:
        async with asyncio.timeout(LIMIT_S):
            while {host.id for host in self._hosts if host.alive and host.free} != {*hosts}:
                self._changed.clear()
                await self._changed.wait()


def test_a_host_that_nobody_uses_is_there_again_when_it_is_not_silent_any_more() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        engine, driver = LocalEngine(cluster), Listening()
        ask = EngineRequest("run", 1, {}, 0, 1, Deadlines(), ScalingConfig(num_workers=1).wanted)
        await engine.open(cast(Any, driver), ask)
        engine.count_silence()
        (host,) = cluster.hosts
        await driver.wait_until_usable(host)
        cluster.freeze_host(host)
        await driver.wait_until_usable()
        cluster.thaw_host(host)
        await driver.wait_until_usable(host)
        await engine.close(keep_hosts=False)

    with LocalCluster(slices=1) as cluster:
        asyncio.run(scenario(cluster))


@pytest.mark.parametrize(
    ("run", "workers", "is_free"),
    [("", 0, True), ("", 1, False), ("mine", 1, True), ("another", 0, False)],
)
def test_a_host_is_free_that_is_ours_or_nobodys_and_empty(run: str, workers: int, is_free: bool) -> None:
    engine = SimpleNamespace(
        request=SimpleNamespace(holder="mine", workers=1),
        status_changed=lambda: None,
        sink=SimpleNamespace(on_message=lambda host, message: None),
    )
    link = LocalLink(cast(Any, engine), HostFile("host", "slice", 0, 1, 1, 1, 1))
    link.received(wire.Status("host", wire.WIRE_VERSION, 1, run, 1, workers))
    assert link.view().free is is_free
