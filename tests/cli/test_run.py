"""``everstep run``: scripts that torchrun could have started, unchanged."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from everstep import RunConfig, Trainer, TrainingFailedError
from everstep.agent.script import ScriptRun
from everstep.cli.main import main
from processes import LIMIT_S

DDP = """
import argparse, os, signal, sys, time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import beside


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--folder")
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), os.path.join(asked.folder, "saved.pt")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    if os.path.exists(saved):
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        step = state["step"]
    again = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"rank {rank} of {dist.get_world_size()} at {step}, restart {again}, {beside.WORD}", flush=True)
    while step < asked.steps:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        step += 1
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "step": step}, saved + ".new")
            os.replace(saved + ".new", saved)
        dist.barrier()
        if step == 5 and rank == 1 and again == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    del model  # before its group: torch joins threads then that may wait for the GIL
    dist.destroy_process_group()
    open(os.path.join(asked.folder, f"done-{rank}-of-{os.environ['WORLD_SIZE']}"), "w").close()


if __name__ == "__main__":
    main()
"""


JAX = """
import argparse, os, signal

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    asked = parser.parse_args()
    jax.distributed.initialize("127.0.0.1:1", jax.process_count(), jax.process_index())
    rank, again = jax.process_index(), int(os.environ["EVERSTEP_RESTART_COUNT"])
    total = 0.0
    for step in range(asked.steps):
        total += float(multihost_utils.process_allgather(jnp.array([1.0 + rank])).sum())
        if step == 2 and rank == 1 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} of {jax.process_count()}: {total}, restart {again}", flush=True)
"""


def everstep(
    folder: Path, *arguments: str, most_descriptors: int | None = None
) -> subprocess.CompletedProcess[str]:
    def limit_descriptors() -> None:
        if most_descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_descriptors, most_descriptors))

    return subprocess.run(
        [
            sys.executable,
            "-P",  # like the command `everstep`, without the current folder in sys.path
            "-m",
            "everstep.cli.main",
            "run",
            "--storage-path",
            str(folder / "runs"),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        preexec_fn=limit_descriptors,
    )


def test_a_spent_budget_is_named_by_its_option(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('a bug')")
    ran = everstep(tmp_path, "fails.py")
    assert ran.returncode == 1
    assert "\nno restart allowed (--max-restarts 0)\n" in ran.stderr
    assert "max_failures" not in ran.stderr


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("WORD = 'with what lies beside it'")
    path = tmp_path / "ddp.py"
    path.write_text(DDP)
    return str(path)


def test_a_script_of_torchruns_survives_a_kill_unchanged(tmp_path: Path, script: str) -> None:
    options = ("--nproc_per_node=2", "--max-restarts", "1", "--standalone")
    done = everstep(tmp_path, *options, script, "--steps", "9", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2 at 0, restart 0, with what lies beside it" in output
        assert f"rank {rank} of 2 at 5, restart 1, with what lies beside it" in output
        assert (tmp_path / f"done-{rank}-of-2").exists()
    first, _, _ = done.stderr.partition("[rank 0] Traceback")
    assert "rank 1 failed: signal: killed by SIGKILL" in first, "the cause comes before what follows from it"
    line = next(line for line in done.stderr.splitlines() if "by «restart in place»" in line)
    assert "steps lost and time to the first step unknown" in line, "the script saves by itself"
    assert "first step" not in line.partition("unknown")[2]


def test_without_restarts_left_it_fails_as_torchrun_does(tmp_path: Path, script: str) -> None:
    done = everstep(tmp_path, "--nproc-per-node", "2", script, "--steps", "9", "--folder", str(tmp_path))
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr


def test_a_module_runs_as_main_with_its_arguments(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nprint(__name__, sys.argv[1:], flush=True)\n")
    done = everstep(tmp_path, "-m", "mine.train", "--its", "own")
    assert done.returncode == 0, done.stderr
    assert "__main__ ['--its', 'own']" in done.stdout + done.stderr


@pytest.mark.parametrize("code", ["0", "None"])
def test_a_script_that_exits_with_nothing_wrong_has_finished(tmp_path: Path, code: str) -> None:
    (tmp_path / "ends.py").write_text(f"import sys\nsys.exit({code})\n")
    fit(tmp_path, ScriptRun(str(tmp_path / "ends.py")))


def test_a_script_that_exits_with_a_number_has_failed(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(TrainingFailedError, match="exit.* 3"):
        fit(tmp_path, ScriptRun(str(tmp_path / "ends.py")))


def fit(folder: Path, script: ScriptRun) -> None:
    """Without the command, which imports torch for whatever script."""
    Trainer(script, run_config=RunConfig(storage_path=str(folder / "runs"))).fit()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rdzv-backend", "c10d", "x.py"], "--rdzv-backend isn't an option here. Leave it out"),
        (["--rdzv_endpoint=localhost:0", "x.py"], "--rdzv-endpoint isn't an option here"),
        (
            ["--shutdown_timeout=3", "x.py"],
            "--shutdown-timeout isn't an option here. Leave it out; EVERSTEP_STOP_GRACE_S",
        ),
        (["--run-path", "x.py", "--its", "own"], "--run-path isn't an option here"),
        (["--nnodes", "2", "x.py"], "needs --engine ray"),
        (["--nnodes", "3:2", "x.py"], "neither a number nor MIN:MAX"),
        (["--nproc-per-node", "many", __file__], "neither a number nor gpu"),
        (["--nproc-per-node", "gpu", "--nonsense", "x.py"], "No such option"),
        (["x.py"], "there is no file 'x.py'"),
        (["-m", "no_such_package.train"], "there is no module 'no_such_package.train' here"),
        (["-m", "everstep.no_such_module"], "there is no module 'everstep.no_such_module' in"),
        (["--standalone", "--engine", "ray", "x.py"], "--standalone means this machine"),
        (["--show-ranks", "a", __file__], "isn't a list of ranks"),
    ],
)
def test_what_makes_no_sense_is_named(options: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["run", *options])
    assert result.exit_code == 2
    assert says in result.output


def test_more_workers_than_a_machine_can_have_are_refused_before_any_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    done = everstep(tmp_path, "--nproc-per-node=100000", "train.py", most_descriptors=4096)
    assert done.returncode == 1
    assert "100000 workers on this machine, which has room for at most 313" in done.stderr
    assert "4096 file descriptors for each process (ulimit -Hn)" in done.stderr
    assert "--nproc-per-node" in done.stderr
    assert not (tmp_path / "started").exists()


def test_only_installed_packages_are_imported_ahead(tmp_path: Path, script: str) -> None:
    assert ScriptRun(script).imports() == ["torch", "torch.distributed", "torch.nn.parallel"]
    (tmp_path / "broken.py").write_text("import torch\nthis is no python")
    assert ScriptRun(str(tmp_path / "broken.py")).imports() == []


REPORTING = """
import os, signal, tempfile, time
from pathlib import Path

import everstep

checkpoint, step = everstep.get_checkpoint(), 0
if checkpoint is not None:
    with checkpoint.as_directory() as folder:
        step = int(Path(folder, "step").read_text())
began = step
while step < 6:
    step += 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "step").write_text(str(step))
        everstep.report({"step": step}, checkpoint=everstep.Checkpoint(folder))
    if step == 3:
        while not Path("driver").exists():
            time.sleep(0.01)
        everstep.get_all_reported_checkpoints()  # once all of them are committed
        os.kill(int(Path("driver").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
print(f"began at {began}, ended at {step}", flush=True)
"""


UNRULY = """
import atexit, multiprocessing, os, signal, sys, threading


def note(word, here=os.getcwd()):
    with open(os.path.join(here, "notes"), "a") as file:
        file.write(word + "\\n")


def main():
    os.chdir("/")
    note(f"{os.path.basename(__file__)} has {len(sys.argv)} arguments, {sum(map(len, sys.argv[1:]))} letters")
    note(f"the first is {os.fsencode(sys.argv[1])}")
    atexit.register(note, "atexit")
    signal.signal(signal.SIGTERM, lambda *_: note("SIGTERM, although it has ended"))
    for leave in (lambda: sys.exit(0), lambda: 1 / 0, lambda: None):
        child = os.fork()
        if child == 0:
            atexit.unregister(note)
            return leave()
        note(f"child ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    print("shown before the end", flush=True)
    goes_on = threading.Event()
    threading.Thread(target=lambda: (goes_on.wait(), note("thread"))).start()
    threading.Timer(0.2, goes_on.set).start()
    multiprocessing.get_context("spawn").Process(target=note, args=("process", *note.__defaults__)).start()
    sys.stdout.close()
    sys.stdout = None


if __name__ == "__main__":
    main()
"""


def test_an_unruly_script_ends_as_it_does_under_python(tmp_path: Path) -> None:
    folder = tmp_path / "with spaces, and ünicode"
    folder.mkdir()
    (folder / "the script.py").write_text(UNRULY)
    (tmp_path / "a link.py").symlink_to(folder / "the script.py")
    arguments = ["x" * 100_000] * 15
    done = everstep(tmp_path, "a link.py", os.fsdecode(b"not \xff text"), *arguments)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "shown before the end" in shown
    assert "in <lambda>" in shown, "the child's traceback"
    assert "worker.py" not in shown, "from the script's own line on"
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes[:5] == [
        "a link.py has 17 arguments, 1500010 letters",
        "the first is b'not \\xff text'",
        "child ended with 0",
        "child ended with 1",
        "child ended with 0",
    ]
    assert sorted(notes[5:]) == ["atexit", "process", "thread"]
    assert notes.index("thread") < notes.index("atexit"), "threads are waited for first"


def test_what_a_script_exits_with_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit('no data in /data')\n")
    done = everstep(tmp_path, "train.py")
    assert done.returncode == 1
    assert "no data in /data" in done.stderr


FITS = """
from everstep import RunConfig, ScalingConfig, Trainer

def train():
    print("trained")

if __name__ == "__main__":
    run = RunConfig(name="fits", storage_path="runs")
    Trainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()
"""


def test_a_script_that_starts_workers_itself_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FITS)
    done = everstep(tmp_path, "--nproc-per-node", "2", "train.py")
    assert done.returncode == 1
    assert "Trainer.fit() is called in a worker of `everstep run`" in done.stderr
    assert "Start the script with plain `python`" in done.stderr
    assert "RunOwnedError" not in done.stderr
    assert not (tmp_path / "runs" / "fits").exists()
    alone = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "trained" in alone.stdout + alone.stderr


def test_the_same_name_again_resumes_a_run_whose_driver_has_died(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPORTING)
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--framework=jax", "--max-restarts=1"]
    command += ["--storage-path", "runs", "--name", "named"]
    first = subprocess.Popen([*command, "train.py"], cwd=tmp_path)
    (tmp_path / "pid").write_text(str(first.pid))
    (tmp_path / "pid").rename(tmp_path / "driver")
    assert first.wait(LIMIT_S) == -signal.SIGKILL
    again = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert again.returncode == 0, again.stderr
    assert "began at 3, ended at 6" in again.stdout + again.stderr


def test_a_script_for_jax_finds_its_job_ready_and_survives(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JAX)
    done = everstep(
        tmp_path,
        "--framework",
        "jax",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "train.py",
        "--steps=5",
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2: 15.0, restart 1" in done.stdout + done.stderr


def fails() -> None:
    raise ValueError("in my own code")


@pytest.mark.parametrize("start", ["script", "module", "function"])
def test_a_traceback_begins_with_the_users_own_frame(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(
        "def fails():\n    raise ValueError('in my own code')\n\n\nfails()\n"
    )
    monkeypatch.chdir(tmp_path)
    function = {
        "script": ScriptRun("failing.py"),
        "module": ScriptRun("failing", is_module=True),
        "function": fails,
    }[start]
    with pytest.raises(TrainingFailedError) as caught:
        Trainer(function, run_config=RunConfig(storage_path=str(tmp_path / "runs"))).fit()
    header, first, *_ = caught.value.worker_failures[0].traceback.splitlines()
    assert header == "Traceback (most recent call last):"
    assert (__file__ if start == "function" else "failing.py") in first
