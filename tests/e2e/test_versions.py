"""A driver and an agent of two versions of Everstep."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import RunConfig, Trainer
from everstep.engine.local.cluster import socket_of
from everstep.errors import AgentVersionError
from everstep.protocol import framing, wire
from everstep.testing import LocalCluster
from processes import LIMIT_S, alive, wait_for

from .scripts import start

TRAINS = """
    from e2e.training import restore_step, save_step

    def saves_once(config):
        step = restore_step()
        if step == 0:
            everstep.report({"step": 1}, checkpoint=save_step(1))
            everstep.get_all_reported_checkpoints()
            (HERE / "up").write_text(str(os.getpid()))
            threading.Event().wait()
        return step

    result = Trainer(
        saves_once,
        train_loop_config={},
        run_config=RunConfig(name="upgraded", storage_path=str(HERE / "runs")),
    ).fit()
    print("restored step", result.return_value)
    """


def other_version(folder: Path, version: int) -> str:
    """Where an Everstep lies that speaks another version of the protocol."""
    shutil.copytree(Path(everstep.__file__).parent, folder / "everstep")
    protocol = folder / "everstep" / Path(wire.__file__).relative_to(Path(everstep.__file__).parent)
    ours, theirs = f"WIRE_VERSION = {wire.WIRE_VERSION}\n", f"WIRE_VERSION = {version}\n"
    assert ours in protocol.read_text()
    protocol.write_text(protocol.read_text().replace(ours, theirs))
    return str(folder)


@pytest.mark.parametrize("version", [wire.WIRE_VERSION - 1, wire.WIRE_VERSION + 1])
def test_workers_of_another_version_are_not_taken_over_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    with monkeypatch.context() as patch:
        path = f"{other_version(tmp_path / 'other', version)}{os.pathsep}{os.environ['PYTHONPATH']}"
        patch.setenv("PYTHONPATH", path)
        first = start(tmp_path, TRAINS)
    wait_for(lambda: (tmp_path / "up").exists(), "the first checkpoint")
    worker = int((tmp_path / "up").read_text())
    first.kill()
    first.communicate()
    assert alive(worker)
    output, errors = start(tmp_path, TRAINS).communicate(timeout=LIMIT_S)
    assert "restored step 1" in output, errors
    assert f"speaks version {version} of Everstep's protocol, and this driver version" in errors
    assert not alive(worker)


def test_a_cluster_of_another_version_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.syspath_prepend(other_version(tmp_path / "other", 1))
        cluster = LocalCluster(1, 1, 1)
    with cluster, pytest.raises(AgentVersionError, match="Install the same version of Everstep"):
        Trainer(lambda: None, run_config=RunConfig(storage_path=str(tmp_path)), engine=cluster).fit()


@pytest.mark.parametrize("version", [wire.WIRE_VERSION - 1, wire.WIRE_VERSION + 1])
def test_an_agent_takes_no_orders_from_a_driver_of_another_version(version: int) -> None:
    """One that is too old to compare them itself."""
    attach, claim = wire.Attach(version, "theirs", 9), wire.Claim("theirs", 9, 60.0, (os.getpid(), 0))
    with LocalCluster(1, 1, 1) as cluster, socket.socket(socket.AF_UNIX) as driver:
        (host,) = cluster.hosts
        driver.settimeout(LIMIT_S)
        driver.connect(str(socket_of(cluster.folder, host)))
        for message in (attach, claim, attach):
            driver.sendall(framing.frame(message))
        frames = framing.Frames()
        told: list[Any] = []
        while len(told) < 2:
            told += [wire.from_agent.decode(body) for body in frames.feed(driver.recv(1 << 16))]
    assert [(status.version, status.run) for status in told] == [(wire.WIRE_VERSION, "")] * 2
