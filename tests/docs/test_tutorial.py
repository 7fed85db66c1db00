"""The tutorial, done as it says: with its script, its commands, and its mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from everstep.cli.main import main
from everstep.observe.registry import live_runs
from processes import LIMIT_S, kill, wait_for

from .pages import blocks

PAGE = blocks("docs/tutorial.md")
SCRIPT, CLUSTER = (block.code for block in PAGE if block.language == "python")
BUG = next(block.code for block in PAGE if "raise ValueError" in block.code)
COMMANDS = [line for block in PAGE if block.language == "console" for line in block.code.splitlines()]


class Reader:
    """Plays the reader of the page, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.terminals: list[subprocess.Popen[bytes]] = []

    def write(self, code: str) -> None:
        (self.folder / "train.py").write_text(code)

    def python(self, script: str = "train.py", **variables: str) -> subprocess.Popen[bytes]:
        with (self.folder / "shown").open("ab") as shown:
            terminal = subprocess.Popen(
                [sys.executable, script],
                cwd=self.folder,
                stdout=shown,
                stderr=shown,
                # Otherwise the last part waits for a quarter of a minute.
                env={
                    **os.environ,
                    "EVERSTEP_BACKOFF_FIRST_S": "0",
                    "EVERSTEP_BACKOFF_MAX_S": "0",
                    **variables,
                },
            )
        self.terminals.append(terminal)
        return terminal

    def everstep(self, command: str) -> str:
        """Types a command that the page has."""
        assert f"$ everstep {command}" in COMMANDS
        result = CliRunner().invoke(main, command.split())
        assert result.exit_code == 0, result.output
        return result.output

    @property
    def shown(self) -> str:
        return (self.folder / "shown").read_text()

    def sees(self, text: str, times: int = 1) -> None:
        wait_for(lambda: self.shown.count(text) >= times, f"{times}× {text!r}")

    def waits_for_a_checkpoint(self) -> None:
        wait_for(lambda: list(self.folder.glob("runs/tutorial/checkpoint_*/.manifest.json")), "a checkpoint")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path)
    yield reader
    for terminal in reader.terminals:
        kill(terminal.pid)
        terminal.wait()
    for run in live_runs().values():  # of a test that failed
        for worker in run.workers:
            kill(worker.pid)


def test_the_tutorial_goes_as_it_says(reader: Reader) -> None:
    reader.write(SCRIPT)
    first = reader.python()
    reader.sees("slice-0: host")
    assert "rank 3" in reader.everstep("ps")
    reader.waits_for_a_checkpoint()

    reader.everstep("kill tutorial --rank 1")
    reader.sees("recovered in", times=1)
    assert "rank 1: killed by SIGKILL" in reader.shown
    assert "state from memory" in reader.shown

    reader.everstep("kill tutorial --rank 2 --signal STOP")
    assert "stopped" in reader.everstep("top tutorial --once")
    assert "in train_fn" in reader.everstep("stacks tutorial")
    reader.sees("recovered in", times=2)
    assert "rank 2 failed: hang: no progress for " in reader.shown
    assert "its process is stopped (SIGSTOP)" in reader.shown
    assert "stacks of all ranks are in hangs/" in reader.shown
    wait_for(lambda: "recoveries: 2" in reader.everstep("show runs/tutorial"), "what is shown, on record")

    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert "driver gone" in reader.everstep("ps")
    second = reader.python()
    reader.sees("took over 4 workers, which never stopped")

    reader.everstep("stop tutorial")
    second.wait(LIMIT_S)
    assert "stopped" in reader.everstep("show runs/tutorial")
    assert "opened by" in reader.everstep("events runs/tutorial")

    line = "        step += 1\n"
    assert line in SCRIPT
    reader.write(SCRIPT.replace(line, line + BUG))
    assert reader.python().wait(LIMIT_S) == 1
    shown = reader.everstep("show runs/tutorial").splitlines()
    cause = next(line for line in shown if line.startswith("first cause"))
    assert "rank 3" in cause
    assert "ValueError: bad batch at step" in cause

    reader.write(SCRIPT)
    assert "$ STEPS=100 python train.py" in COMMANDS
    assert reader.python(STEPS="100").wait(LIMIT_S) == 0, reader.shown
    assert "final loss" in reader.shown


def test_the_cluster_on_the_desk_replaces_a_slice(reader: Reader) -> None:
    (reader.folder / "cluster.py").write_text(CLUSTER)
    assert reader.python("cluster.py").wait(LIMIT_S) == 0, reader.shown
    assert "recovered in" in reader.shown
    assert "replace" in reader.shown
