"""``num_workers=0`` in processes that torchrun started: one group, and one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import everstep
from processes import LIMIT_S

SCRIPT = """
import json, os, sys, tempfile
from pathlib import Path

import everstep as train
from everstep.torch import TorchTrainer

def train_loop(config):
    import torch
    import torch.distributed as dist

    context = train.get_context()
    rank = context.get_world_rank()
    checkpoint = train.get_checkpoint()
    start = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            start = int((Path(folder) / f"rank-{rank}").read_text())
    facts = train.collective.broadcast_from_rank_zero({"leader": os.getpid()})
    for step in range(start + 1, config["steps"] + 1):
        total = torch.tensor([1.0 + rank])
        dist.all_reduce(total)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / f"rank-{rank}").write_text(str(step))
            train.report({"step": step, "rank": rank}, checkpoint=train.Checkpoint(folder))
        if step == config.get("fail_at") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            train.collective.barrier()
            raise RuntimeError("once")
    place = [context.get_world_size(), rank, context.get_local_rank(), context.get_local_world_size()]
    return {"place": place, "sum": total.item(), "start": start, **facts}

result = TorchTrainer(
    train_loop,
    train_loop_config=json.loads(sys.argv[1]),
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(storage_path="runs", name=sys.argv[2] if len(sys.argv) > 2 else None),
).fit()
facts = {"pid": os.getpid(), "kept": len(result.best_checkpoints), "path": result.path}
facts |= {"metrics": result.metrics, **result.return_value}
Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(facts))
"""


CONFLICT = """
import tempfile
from pathlib import Path

import everstep as train
from everstep.torch import TorchTrainer

def train_loop():
    rank = train.get_context().get_world_rank()
    if rank:
        train.collective.barrier()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").write_text(f"of rank {rank}")
        train.report({}, checkpoint=train.Checkpoint(folder))
    if not rank:
        train.collective.barrier()

TorchTrainer(
    train_loop,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(storage_path="runs"),
).fit()
"""


def torchrun(folder: Path, config: dict[str, Any], *more: str, restarts: int = 0) -> list[dict[str, Any]]:
    done = launched(folder, SCRIPT, json.dumps(config), *more, restarts=restarts)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def launched(
    folder: Path, script: str, *arguments: str, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    launch = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", "--local-addr=127.0.0.1"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, "script.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_processes_of_torchrun_are_one_group_with_one_run(tmp_path: Path) -> None:
    leader, other = torchrun(tmp_path, {"steps": 20})
    assert [leader["place"], other["place"]] == [[2, 0, 0, 2], [2, 1, 1, 2]]
    assert leader["sum"] == other["sum"] == 3.0
    assert other["leader"] == leader["pid"]
    assert leader["path"] == other["path"]
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert leader["metrics"] == other["metrics"] == {"step": 20, "rank": 0}
    assert leader["kept"] == other["kept"] == 20
    result = everstep.Result.from_path(leader["path"])
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert {path.name: path.read_text() for path in Path(folder).iterdir() if "rank" in path.name} == {
            "rank-0": "20",
            "rank-1": "20",
        }


def test_torchrun_restarts_the_group_and_it_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    leader, other = torchrun(tmp_path, {"steps": 6, "fail_at": 4}, "named", restarts=1)
    assert (leader["start"], other["start"]) == (4, 4)
    assert leader["metrics"] == {"step": 6, "rank": 0}


def test_a_checkpoint_that_can_not_be_committed_once_another_rank_has_reported_ends_the_run(
    tmp_path: Path,
) -> None:
    done = launched(tmp_path, CONFLICT)
    assert done.returncode != 0
    assert "ranks 0 and 1" in done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert everstep.Result.from_path(str(run)).checkpoint is None


def test_a_trainer_that_has_no_group_of_processes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import everstep as train\n"
        "train.Trainer(print, scaling_config=train.ScalingConfig(num_workers=0)).fit()\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={
            **os.environ,
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        },
    )
    assert done.returncode == 1
    assert "everstep.torch.TorchTrainer" in done.stderr
