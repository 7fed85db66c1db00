"""``everstep stacks``, ``top`` and ``logs`` on real runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from click.testing import CliRunner, Result

from everstep.cli.main import main
from everstep.observe.registry import LiveRun, live_runs
from nvml import DRIVER_NOT_LOADED, GIB, Gpu, StandIn, without_compiler
from processes import LIMIT_S, wait_for

SCRIPT = textwrap.dedent(
    """
    import sys, time
    import everstep

    def wait_here():
        time.sleep(3600)

    def wait_there():
        time.sleep(3600)

    def train():
        rank = everstep.get_context().get_world_rank()
        print(f"hello from {rank}", flush=True)
        print("half a line", end="", flush=True)
        everstep.report({"step": 1})
        wait_there() if rank == 1 else wait_here()

    everstep.Trainer(
        train,
        scaling_config=everstep.ScalingConfig(num_workers=3),
        run_config=everstep.RunConfig(
            name="looked-at",
            storage_path=sys.argv[1],
            deadlines=everstep.Deadlines(orphan_s=0, hang_s=3600),
        ),
    ).fit()
    """
)


@contextmanager
def running(tmp_path: Path) -> Iterator[LiveRun]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.DEVNULL) as process:
        try:
            logs = tmp_path / "looked-at" / "logs" / "attempt-0001"
            wait_for(
                lambda: sum("half" in file.read_text() for file in logs.glob("rank-*.log")) == 3,
                "what every rank prints",
            )
            wait_for(lambda: "looked-at" in live_runs(), "the run")
            yield live_runs()["looked-at"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_stacks_shows_where_ranks_are_the_odd_one_first(tmp_path: Path) -> None:
    with running(tmp_path):
        wait_for(lambda: "in wait_there" in invoke("stacks", "looked-at").output, "the last line of rank 1")
        shown = invoke("stacks", "looked-at").output
        first, second = shown.split("=== ")[1:]
        assert first.startswith("rank 1\n")
        assert "in wait_there" in first
        assert first.splitlines()[3].endswith("in train"), "from the user's first line on"
        assert second.startswith("ranks 0, 2\n")
        assert "in wait_here" in second
        assert "everstep-link" not in first
        assert "in listen" in invoke("stacks", "looked-at", "--threads").output


def test_looking_at_workers_leaves_them_as_they_are(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        for _ in range(3):
            invoke("stacks", "looked-at")
        assert all(worker.alive for worker in run.workers)
        assert live_runs()["looked-at"].workers == run.workers


def test_top_shows_what_each_rank_does_and_uses(tmp_path: Path) -> None:
    with running(tmp_path):
        wait_for(lambda: looked_at().count("training") == 3, "the first report of every rank")
        head, *ranks = looked_at().splitlines()
        assert head.split() == [
            *("RANK", "DOING", "REPORTS", "REPORTS/S", "COLLECTIVES/S", "CPU", "MEMORY")
        ], "one host, which needs no column"
        assert len(head) <= 80
        assert [line.split()[0] for line in ranks] == ["0", "1", "2"]
        for line in ranks:
            *_, doing, reports, rate, _, _, _, _, unit = line.split()
            assert (doing, reports, rate) == ("training", "1", "0.0")
            assert unit in ("MiB", "GiB")


def looked_at() -> str:
    wide = {"COLUMNS": "160"}
    return CliRunner(env=wide).invoke(main, ["top", "looked-at", "--once", "--every", "0.1"]).output


@without_compiler
def test_top_shows_the_gpus_that_each_rank_uses(tmp_path: Path) -> None:
    nvml = StandIn(tmp_path / "nvml")
    nobody = 2**22 + 1  # above every pid
    with running(tmp_path) as run:
        wait_for(lambda: looked_at().count("training") == 3, "the first report of every rank")
        first, second, _ = (worker.pid for worker in sorted(run.workers, key=lambda worker: worker.rank))
        nvml.reports(
            Gpu(97, [(first, 70 * GIB, 97)]),
            Gpu(90, [(first, GIB, 60), (second, 2 * GIB, 25), (nobody, GIB, 5)]),
        )
        head, *ranks = looked_at_with(nvml)
        assert head.endswith("MEMORY   GPU GPU MEMORY")
        assert len(head) <= 80
        assert ranks[0].split()[-4:] == ["157", "%", "71.0", "GiB"], "of two GPUs"
        assert ranks[1].split()[-4:] == ["25", "%", "2.0", "GiB"], "of one that it shares"
        assert len(ranks[2].rstrip()) < head.index("GPU"), "of none"
        without = looked_at().splitlines()[0]
        nvml.reports(Gpu(90, [(nobody, GIB, 90)]))
        assert looked_at_with(nvml)[0] == without, "none of theirs"
        nvml.reports(Gpu(90, [(first, GIB, 90)]), init=DRIVER_NOT_LOADED)
        assert looked_at_with(nvml)[0] == without


def looked_at_with(nvml: StandIn) -> list[str]:
    """By a process that finds the library where the system looks for it."""
    command = [sys.executable, "-m", "everstep.cli.main", "top", "looked-at", "--once", "--every", "0.1"]
    environment = {**os.environ, **nvml.environment, "COLUMNS": "80"}
    return subprocess.run(
        command, env=environment, capture_output=True, check=True, text=True
    ).stdout.splitlines()


def test_top_of_a_stopped_rank_says_so_and_a_missing_run_is_named(tmp_path: Path) -> None:
    assert "no run is live" in invoke("top", "looked-at").output
    with running(tmp_path) as run:
        victim = next(worker.pid for worker in run.workers if worker.rank == 1)
        os.kill(victim, signal.SIGSTOP)
        try:
            wait_for(lambda: "stopped" in looked_at(), "what the kernel says of it")
        finally:
            os.kill(victim, signal.SIGCONT)


def test_logs_shows_what_ranks_have_printed(tmp_path: Path) -> None:
    with running(tmp_path):
        run = str(tmp_path / "looked-at")
        every = invoke("logs", run).output
        assert [line for line in every.splitlines() if "hello" in line] == [
            f"[rank {rank}] hello from {rank}" for rank in range(3)
        ]
        assert "[rank 2] half a line" in every
        assert invoke("logs", run, "--rank", "1").output == "[rank 1] hello from 1\n[rank 1] half a line\n"
        assert "there is no attempt 7" in invoke("logs", run, "--attempt", "7").output
        missing = invoke("logs", run, "--rank", "7")
        assert missing.exit_code == 1
        assert "there is no rank 7" in missing.output
        assert "there is 0, 1, 2" in missing.output


def test_logs_follows_what_is_printed_until_it_is_interrupted(tmp_path: Path) -> None:
    with running(tmp_path):
        command = [sys.executable, "-m", "everstep.cli.main", "logs", str(tmp_path / "looked-at"), "-f"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follows:
            assert follows.stdout is not None
            assert follows.stdout.readline() == "[rank 0] hello from 0\n"
            log = tmp_path / "looked-at" / "logs" / "attempt-0001" / "rank-00000.log"
            with log.open("a") as file:
                file.write(" becomes whole\n")
            seen = ""
            while "whole" not in seen:
                seen = follows.stdout.readline()
            assert seen == "[rank 0] half a line becomes whole\n"
            follows.send_signal(signal.SIGINT)
            assert follows.wait(LIMIT_S) == 0


def test_a_run_that_is_not_there_is_said_so() -> None:
    for command in ("stacks", "top"):
        assert "'nobody' has ended, or runs elsewhere" in invoke(command, "nobody").output
    assert invoke("logs", "nobody").exit_code == 1
