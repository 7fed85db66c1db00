"""Hosts that have another version of Everstep than the driver."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.test_versions import other_version
from e2e.training import elastic_steps
from everstep.errors import AgentVersionError

from .cluster import LONE, RayCluster, Running


def test_a_host_of_another_version_is_refused_with_the_remedy(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add_lone_host("slice-0")
    path = f"{other_version(tmp_path / 'other', 1)}{os.pathsep}{os.environ['PYTHONPATH']}"
    run = Running(
        tmp_path, elastic_steps, 1, scaling=LONE, worker_runtime_env={"env_vars": {"PYTHONPATH": path}}
    )
    with pytest.raises(AgentVersionError, match=r"speaks version 1 .*Install the same version"):
        run.wait()
