"""``everstep doctor``: what it sees, and what it says of that."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from everstep.cli.main import main
from everstep.observe.registry import LiveRun, LiveWorker, publish_run
from processes import wait_for


def doctor(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, ["doctor", *arguments])


def line_of(done: Result, what: str) -> str:
    return next(line for line in done.output.splitlines() if line[6:].startswith(what))


def test_storage_that_can_hold_a_run_is_fine_and_stays_as_it_was(tmp_path: Path) -> None:
    done = doctor(str(tmp_path))
    assert done.exit_code == 0
    assert line_of(done, "storage").startswith("ok")
    assert list(tmp_path.iterdir()) == []
    assert line_of(done, "system").startswith("ok")


def test_storage_that_cannot_is_bad_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = doctor(str(tmp_path / "file"))
    assert done.exit_code == 1
    assert line_of(done, "storage").startswith("bad")


def test_without_storage_none_is_looked_at() -> None:
    assert "storage" not in doctor().output


def test_a_low_limit_of_open_files_is_noted_with_the_command_that_raises_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        done = doctor()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert done.exit_code == 0
    assert line_of(done, "open files").startswith("note")
    assert "ulimit -n 4096" in done.output


def test_a_tool_that_is_missing_is_noted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    done = doctor(PATH=str(tmp_path))
    assert line_of(done, "py-spy").startswith("note")
    assert "pip install py-spy" in done.output


def test_workers_that_lost_their_driver_are_named() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    driver = subprocess.Popen([sys.executable, "-c", ""])
    try:
        publish_run(LiveRun("left", "/nowhere", driver.pid, 1, [LiveWorker(0, worker.pid, "host", "slice")]))
        driver.wait()
        wait_for(lambda: "left has workers here, and no driver" in doctor().output, "the look at its driver")
    finally:
        for process in (worker, driver):
            process.kill()
            process.wait()
    assert os.environ["XDG_RUNTIME_DIR"] in doctor().output
