"""The examples for Ray, run as a user runs them; and the same command after the whole cluster went down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep import Result
from everstep.journal import journal, records
from processes import LIMIT_S, wait_for

from .cluster import RayCluster

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(script: str, address: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_ADDRESS": address},
    )


def test_a_jax_example_trains_on_two_slices(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # of the nodes: these have no TPUs but in name
    for name in ("slice-0", "slice-1"):
        cluster.add_lone_host(name)
    arguments = ("--topology", "2x4", "--chips_per_worker", "8", "--workers", "2", "2", "--steps", "60")
    process = run("tpu_slices.py", cluster.address, "--storage_path", str(tmp_path), *arguments)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "finished step 59 on 2 slices" in output


def test_the_same_command_resumes_on_a_new_cluster_after_the_old_one_went_down(
    cluster: RayCluster, tmp_path: Path
) -> None:
    arguments = ("--storage_path", str(tmp_path), "--run_name", "phoenix", "--steps", "1000")
    folder = tmp_path / "phoenix"

    def committed() -> int:
        return sum(isinstance(record, records.Committed) for record in journal.read(folder))

    old = RayCluster()
    try:
        for _ in range(2):
            old.add_node({}, {}, cpus=1)
        first = run("on_ray.py", old.address, *arguments)
        wait_for(lambda: folder.exists() and committed() >= 3, "checkpoints")
    finally:
        # Head, nodes, and the driver that ran on the head.
        first.kill()
        first.communicate()
        old.close()
    reached = Result.from_path(str(folder)).metrics_history[-1]["step"]
    assert reached < 999
    for _ in range(2):
        cluster.add_node({}, {}, cpus=1)
    output, _ = run("on_ray.py", cluster.address, *arguments).communicate(timeout=LIMIT_S)
    assert "finished step 999" in output, output
    starts = [r for r in journal.read(folder) if type(r).__name__ == "GroupStarted"]
    assert starts[-1].checkpoint is not None, "it went on from a checkpoint"
