"""``everstep run --engine ray``: a script on several nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import LIMIT_S

from .cluster import RayCluster

SCRIPT = """
import os, signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
again = os.environ["TORCHELASTIC_RESTART_COUNT"]
if dist.get_rank() == 1 and again == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")]
print(" ".join(["place", *place, str(total.item()), again]), flush=True)
dist.destroy_process_group()
"""


def test_a_script_runs_on_several_nodes_and_survives(cluster: RayCluster, tmp_path: Path) -> None:
    for _ in range(2):
        cluster.add_node({}, {}, cpus=1)
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--engine", "ray", "--nnodes", "2", "--max-restarts", "1", "--storage-path", str(tmp_path)]
    options += ["--tee", "1", "--log-dir", "logs"]
    done = subprocess.run(
        [sys.executable, "-m", "everstep.cli.main", "run", *options, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for node in (0, 1):
        place = f"place {node} 2 0 {node} 2 3.0 1"
        assert place in said
        (file,) = (tmp_path / "logs").glob(f"*-{node}/attempt_1/0/stdout.log")
        assert file.read_text() == f"{place}\n", "each node has a folder of its own"
