"""``everstep`` on real runs, each with a runtime folder of its own: ``kill`` never meets anybody else's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

import everstep
from everstep.cli.main import main
from everstep.observe.registry import LiveRun, LiveWorker, live_runs, publish_run
from processes import LIMIT_S, ours, wait_for

SCRIPT = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    import everstep
    from everstep.testing import LocalCluster

    def train(config):
        while not Path(config["stop"]).exists():
            everstep.report({})
            time.sleep(0.05)

    name, storage, stop = sys.argv[1:]
    with LocalCluster(slices=2, hosts_per_slice=2, workers_per_host=1) as cluster:
        everstep.Trainer(
            train,
            train_loop_config={"stop": stop},
            scaling_config=everstep.ScalingConfig(num_workers=2),
            run_config=everstep.RunConfig(
                name=name,
                storage_path=storage,
                failure_config=everstep.FailureConfig(max_failures=-1),
                deadlines=everstep.Deadlines(orphan_s=0, backoff_first_s=0.0, backoff_max_s=0.0),
            ),
            engine=cluster,
        ).fit()
    """
)


def test_every_command_is_described_in_a_line_of_80_columns():
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:")[2]


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ev", dir="/tmp")  # short: sockets live below it
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield
    shutil.rmtree(folder)


class Run:
    """A run in a process of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.stop = folder / f"{name}.stop"
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, str(folder / "storage"), str(self.stop)]
        )
        wait_for(lambda: name in live_runs(), f"{name} to start")

    @property
    def live(self) -> LiveRun:
        return live_runs()[self.name]

    def worker(self, rank: int) -> LiveWorker:
        return next(worker for worker in self.live.workers if worker.rank == rank)

    def wait_for_epoch(self, epoch: int) -> None:
        wait_for(lambda: self.live.epoch >= epoch, f"epoch {epoch} of {self.name}")

    def end(self) -> int:
        self.stop.touch()
        return self.process.wait(LIMIT_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started = Run(tmp_path, "first")
    yield started
    assert started.end() == 0
    assert live_runs() == {}


def everstep_cli(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_version_and_help_need_no_run():
    assert everstep.__version__ in everstep_cli("--version").output
    assert "kill" in everstep_cli("--help").output


def test_help_imports_nothing_of_the_driver():
    script = "import sys; from everstep.cli.main import main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert not {"everstep.driver", "everstep.engine", "msgspec", "asyncio", "rich"} & set(done.stdout.split())


def test_without_a_run_kill_says_so():
    done = everstep_cli("kill", "first", "--rank", "0")
    assert done.exit_code == 1
    assert "no run is live" in done.output


@pytest.mark.parametrize("options", [[], ["--rank", "0", "--host", "h"]])
def test_kill_wants_exactly_one_target(options):
    done = everstep_cli("kill", "first", *options)
    assert done.exit_code == 2
    assert "one of --rank, --host and --slice" in done.output


def test_ps_lists_the_run_and_its_workers(run: Run):
    lines = everstep_cli("ps").output.splitlines()
    assert lines[0].split()[:5] == ["first", "driver", str(run.process.pid), "attempt", "1"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["rank", str(w.rank), "pid", str(w.pid)] for w in sorted(run.live.workers, key=lambda w: w.rank)
    ]


def test_wrong_names_are_answered_with_the_right_ones(run: Run):
    for arguments, expected in (
        (["nonsense", "--rank", "1"], "there is first"),
        (["first", "--rank", "9"], "no rank 9; its ranks are 0, 1"),
        (["first", "--host", "nonsense"], "slice-0-host-0, slice-0-host-1, slice-1-host-0"),
        (["first", "--slice", "nonsense"], "there is slice-0, slice-1"),
    ):
        done = everstep_cli("kill", *arguments)
        assert done.exit_code == 1
        assert expected in done.output
    assert run.live.epoch == 1


def test_a_killed_rank_comes_back_with_another_pid(run: Run):
    victim = run.worker(1)
    done = everstep_cli("kill", "first", "--rank", "1")
    assert done.exit_code == 0, done.output
    assert done.output == f"killed rank 1 of first: pid {victim.pid} on {victim.host}\n"
    run.wait_for_epoch(2)
    assert run.worker(1).pid != victim.pid


def test_a_killed_host_takes_everything_on_it_along(run: Run):
    victim = run.worker(1)
    done = everstep_cli("kill", "first", "--host", victim.host)
    assert done.exit_code == 0, done.output
    assert f"rank 1 pid {victim.pid}" in done.output
    run.wait_for_epoch(2)
    assert not victim.alive
    assert victim.slice not in {worker.slice for worker in run.live.workers}


def test_a_killed_slice_is_replaced_by_the_spare_one(run: Run):
    done = everstep_cli("kill", "first", "--slice", "slice-0")
    assert done.exit_code == 0, done.output
    assert [line.split()[2] for line in done.output.splitlines()] == ["slice-0-host-0", "slice-0-host-1"]
    run.wait_for_epoch(2)
    assert {worker.slice for worker in run.live.workers} == {"slice-1"}


def test_a_frozen_host_is_replaced_and_can_be_thawed_although_it_is_no_longer_in_use(run: Run):
    victim = run.worker(1)
    assert everstep_cli("kill", "first", "--host", victim.host, "--signal", "STOP").exit_code == 0
    run.wait_for_epoch(2)
    assert victim.host not in {worker.host for worker in run.live.workers}
    done = everstep_cli("kill", "first", "--host", victim.host, "--signal", "cont")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"thawed host {victim.host}")
    wait_for(lambda: not victim.alive, "the replaced worker to end")


def test_a_run_must_be_named_even_if_it_is_the_only_one_and_no_other_is_touched(tmp_path: Path, run: Run):
    other = Run(tmp_path, "second")
    try:
        done = everstep_cli("kill", "--rank", "0")
        assert done.exit_code == 2
        assert "Missing argument 'RUN'" in done.output
        assert everstep_cli("kill", "second", "--rank", "0").exit_code == 0
        wait_for(lambda: other.live.epoch == 2, "the second run to recover")
        assert run.live.epoch == 1
    finally:
        assert other.end() == 0


def test_what_a_killed_driver_left_behind_is_skipped_and_cleared(tmp_path: Path):
    run = Run(tmp_path, "doomed")
    run.process.kill()
    run.process.wait()
    wait_for(lambda: live_runs() == {}, "its workers to go")
    assert "No run is live" in everstep_cli("ps").output
    assert list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("everstep-*/runs/*")) == []
    wait_for(lambda: not [pid for pid in ours() if pid != os.getpid()], "its agents to go")


def test_a_pid_that_belongs_to_somebody_else_by_now_is_not_touched():
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        publish_run(
            LiveRun("mine", "/nowhere", os.getpid(), 1, [LiveWorker(0, stranger.pid, "host", "slice")])
        )
        path = next(Path(os.environ["XDG_RUNTIME_DIR"]).glob("everstep-*/runs/mine.*.json"))
        run = msgspec.json.decode(path.read_bytes(), type=LiveRun)
        older = msgspec.structs.replace(run.workers[0], pid_started=run.workers[0].pid_started - 1)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(run, workers=[older])))
        done = everstep_cli("kill", "mine", "--rank", "0")
        assert done.exit_code == 1
        assert "is gone" in done.output
        assert stranger.poll() is None
    finally:
        stranger.send_signal(signal.SIGKILL)
        stranger.communicate()
