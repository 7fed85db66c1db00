"""``num_workers=0`` in processes that torchrun started: one group, and one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

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
    run_config=train.RunConfig(storage_path="runs", name="named"),
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

for function in (look, conflict):
    try:
        TorchTrainer(
            function,
            scaling_config=train.ScalingConfig(num_workers=0),
            run_config=train.RunConfig(storage_path=f"{function.__name__}-runs"),
        ).fit()
    except train.TrainingFailedError as error:
        told = str(error)
    else:
        told = "finished"
    Path(f"{function.__name__}-{os.environ['RANK']}").write_text(told)
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


def test_torchrun_restarts_the_group_and_it_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    launched(tmp_path, SCRIPT, json.dumps({"steps": 10, "fail_at": 4}), restarts=1)
    leader, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert (leader["start"], other["start"]) == (4, 4)
    assert [leader["place"], other["place"]] == [[2, 0, 0, 2], [2, 1, 1, 2]]
    assert leader["sum"] == other["sum"] == 3.0
    assert other["leader"] == leader["pid"]
    assert leader["path"] == other["path"]
    assert leader["metrics"] == other["metrics"] == {"step": 10, "rank": 0}
    assert leader["kept"] == other["kept"] == 10
    result = everstep.Result.from_path(leader["path"])
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert {path.name: path.read_text() for path in Path(folder).iterdir() if "rank" in path.name} == {
            "rank-0": "10",
            "rank-1": "10",
        }


class Twice(NamedTuple):
    """A script that trains twice in the same processes, in runs whose names nobody gave."""

    folder: Path

    def told(self, function: str) -> list[str]:
        return [(self.folder / f"{function}-{rank}").read_text() for rank in (0, 1)]

    def result(self, function: str) -> everstep.Result:
        (run,) = (self.folder / f"{function}-runs").iterdir()
        return everstep.Result.from_path(run)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Twice:
    folder = tmp_path_factory.mktemp("twice")
    launched(folder, CHECKPOINTS)
    return Twice(folder)


def test_processes_of_torchrun_are_one_group_with_one_run(twice: Twice) -> None:
    assert twice.result("look").path != twice.result("conflict").path


def test_ranks_see_the_checkpoint_of_their_report_and_may_end_with_an_exit(twice: Twice) -> None:
    assert twice.told("look") == ["finished"] * 2
    assert (twice.result("look").error, len(twice.result("look").best_checkpoints)) == (None, 10)


def test_files_of_one_name_end_the_run_on_every_rank(twice: Twice) -> None:
    for told in twice.told("conflict"):
        assert "ranks 0 and 1 saved 'weights'" in told
    assert twice.result("conflict").error is not None


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
