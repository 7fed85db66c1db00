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


CHECKPOINTS = """
import os, sys, tempfile
from pathlib import Path

import everstep as train
from everstep.torch import TorchTrainer

def save(name, text):
    folder = tempfile.mkdtemp()
    (Path(folder) / name).write_text(text)
    return train.Checkpoint(folder)

def look():
    for step in range(1, 11):
        rank = train.get_context().get_world_rank()
        train.report({"step": step}, checkpoint=save("step", str(step)) if rank == step % 2 else None)
        with train.get_checkpoint().as_directory() as folder:
            assert (Path(folder) / "step").read_text() == str(step), (rank, step, folder)
        assert len(train.get_all_reported_checkpoints()) == step, (rank, step)
        train.collective.barrier()
    sys.exit()

def conflict():
    if train.get_context().get_world_rank() == 0:
        train.report({}, checkpoint=save("weights", "of 0"))
    train.collective.barrier()
    if train.get_context().get_world_rank() == 1:
        train.report({}, checkpoint=save("weights", "of 1"))

try:
    TorchTrainer(
        {"look": look, "conflict": conflict}[sys.argv[1]],
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(storage_path="runs", name="run"),
    ).fit()
except train.TrainingFailedError as error:
    Path(f"rank-{os.environ['RANK']}").write_text(str(error))
else:
    Path(f"rank-{os.environ['RANK']}").write_text("finished")
"""


def launched(folder: Path, script: str, *arguments: str, restarts: int = 0) -> None:
    (folder / "script.py").write_text(script)
    launch = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, "script.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def torchrun(folder: Path, config: dict[str, Any], *more: str, restarts: int = 0) -> list[dict[str, Any]]:
    launched(folder, SCRIPT, json.dumps(config), *more, restarts=restarts)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


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


def test_ranks_see_the_checkpoint_of_their_report_and_may_end_with_an_exit(tmp_path: Path) -> None:
    launched(tmp_path, CHECKPOINTS, "look")
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["finished"] * 2
    result = everstep.Result.from_path(tmp_path / "runs" / "run")
    assert (result.error, len(result.best_checkpoints)) == (None, 10)


def test_files_of_one_name_end_the_run_on_every_rank(tmp_path: Path) -> None:
    launched(tmp_path, CHECKPOINTS, "conflict")
    for rank in (0, 1):
        assert "ranks 0 and 1 saved 'weights'" in (tmp_path / f"rank-{rank}").read_text()
    assert everstep.Result.from_path(tmp_path / "runs" / "run").error is not None


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
