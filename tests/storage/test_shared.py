"""Every host must see the storage that the driver sees."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep import FailureConfig, RunConfig, ScalingConfig, Trainer
from everstep.engine.local.engine import LocalEngine
from everstep.errors import StorageAccessError
from everstep.protocol import wire
from everstep.storage import shared
from everstep.storage.store import open_store
from everstep.testing import LocalCluster


def test_a_host_that_sees_the_marker_is_content(tmp_path: Path) -> None:
    run = open_store(tmp_path / "run")
    first = shared.leave_marker(run, 1)
    shared.find_marker(run, first)
    second = shared.leave_marker(run, 12)
    shared.find_marker(run, second)
    assert not run.exists(first), "one is enough"


def test_a_driver_that_was_replaced_before_it_left_its_marker_removes_nobody_elses(tmp_path: Path) -> None:
    run = open_store(tmp_path / "run")
    owner = shared.leave_marker(run, 12)
    shared.leave_marker(run, 1)
    shared.find_marker(run, owner)


def test_a_folder_that_is_another_one_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_PATIENCE_S", 0.0)
    marker = shared.leave_marker(open_store(tmp_path / "driver's"), 1)
    with pytest.raises(StorageAccessError, match="host's.*all hosts share"):
        shared.find_marker(open_store(tmp_path / "host's"), marker)


class ElsewhereOnOneHost(LocalEngine):
    """The second host has another folder at the same path, as far as it can tell."""

    def send(self, host: str, message: wire.AnyToAgent) -> None:
        if isinstance(message, wire.Prepare) and host.endswith("1"):
            message = msgspec.structs.replace(message, run_folder=message.run_folder + "-elsewhere")
        super().send(host, message)


def test_storage_that_the_hosts_do_not_share_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    def never(config: dict[str, str]) -> None:
        Path(config["ran"]).touch()

    with LocalCluster(slices=1, hosts_per_slice=2) as cluster:
        trainer = Trainer(
            never,
            train_loop_config={"ran": str(tmp_path / "ran")},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=-1)
            ),
            engine=ElsewhereOnOneHost(cluster),  # type: ignore[arg-type]
        )
        with pytest.raises(StorageAccessError, match=r"on \S*1, .*/run-elsewhere is not the same place here"):
            trainer.fit()
    assert not (tmp_path / "ran").exists()
