"""``--redirects``, ``--tee``, ``--log-dir`` and ``--local-ranks-filter``: what torchrun shows and writes, we
show and write.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from everstep.cli.main import main
from processes import LIMIT_S

PRINTS = """
import os, subprocess, sys

rank = os.environ["RANK"]
# Each line in one piece: under torchrun, print() writes its end apart, and others may come between.
sys.stdout.write(f"{rank} print out\\n")
sys.stdout.flush()
sys.stderr.write(f"{rank} print err\\n")
os.write(1, f"{rank} write out\\n".encode())
os.write(2, f"{rank} write err\\n".encode())
subprocess.run(["sh", "-c", f"echo {rank} child out; echo {rank} child err >&2"], check=True)
"""

DIES_ONCE = """
import os, signal, sys, time

rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"{rank} starts, restart {again}\\n".encode())
if again == "0" and rank == "0":
    open("printed", "w").close()
    while True:
        time.sleep(60)
if again == "0":
    while not os.path.exists("printed"):
        time.sleep(0.01)
    for number in range(30_000):
        sys.stdout.write(f"1 line {number}, long enough to fill what lies between\\n")
    sys.stdout.flush()
    os.write(2, b"1 error without an end of line")
    os.kill(os.getpid(), signal.SIGKILL)
"""

OF_A_RANK = re.compile(r"(?:\[rank \d+\] |\[default\d+\]:)?(\d (?:print|write|child) (?:out|err))")


class Launched(NamedTuple):
    """What a launcher made of a script."""

    code: int
    output: str
    files: dict[str, str]
    """By their path below the run's own folder in the log folder."""

    @property
    def shown(self) -> list[str]:
        """What the script printed, of all that is on the console."""
        return sorted(found[1] for line in self.output.splitlines() if (found := OF_A_RANK.fullmatch(line)))

    @property
    def streams(self) -> set[tuple[str, str]]:
        """(rank, stream) of these lines. Of one that it tees, torchrun may miss the end."""
        return {(line.split()[0], line.split()[2]) for line in self.shown}


def everstep(folder: Path, *arguments: str) -> Launched:
    return launched(folder, "everstep.cli.main", "run", "--storage-path=runs", *arguments)


def torchrun(folder: Path, *arguments: str) -> Launched:
    return launched(folder, "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", *arguments)


def launched(folder: Path, *command: str) -> Launched:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
    )
    logs = folder / "the_logs"
    files = {path.relative_to(run).as_posix(): path.read_text() for run, path in log_files(logs)}
    return Launched(done.returncode, done.stdout, files)


def log_files(logs: Path) -> list[tuple[Path, Path]]:
    """(the folder of the run, the file)"""
    return [(run, path) for run in logs.glob("*") for path in run.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "options",
    [
        ("-r", "0:1,1:2", "-t", "1:1,2:3", "--log-dir", "the_logs"),
        ("--redirects=2", "--tee=0:1,1:3", "--local_ranks_filter=1,2", "--log_dir=the_logs"),
    ],
    ids=" ".join,
)
def test_streams_are_shown_and_written_as_torchrun_does(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    ours, theirs = (
        launch(tmp_path / launch.__name__, "--nproc-per-node=3", *options, "../prints.py")
        for launch in (everstep, torchrun)
    )
    assert (ours.code, theirs.code) == (0, 0), ours.output + theirs.output
    assert ours.files == theirs.files
    assert ours.files, "something is in files"
    assert ours.streams == theirs.streams
    assert ours.streams, "something is on the console"
    assert ours.shown == sorted(
        f"{rank} {how} {stream}" for rank, stream in ours.streams for how in ("print", "write", "child")
    )


def test_the_files_of_a_killed_rank_are_whole_and_its_next_attempt_has_others(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    options = ("--nproc-per-node=2", "--max-restarts=1", "-r=0:3,1:2", "-t=1:1", "--log-dir=the_logs")
    ours, theirs = (
        launch(tmp_path / launch.__name__, *options, "../dies.py") for launch in (everstep, torchrun)
    )
    assert (ours.code, theirs.code) == (0, 0), ours.output[-4000:] + theirs.output[-4000:]
    assert ours.files.keys() == theirs.files.keys()
    assert ours.files["attempt_0/1/stdout.log"].count("\n") == 30_001
    assert ours.files["attempt_0/1/stdout.log"] == theirs.files["attempt_0/1/stdout.log"]
    assert ours.files["attempt_0/1/stderr.log"] == "1 error without an end of line"
    for rank in (0, 1):
        assert ours.files[f"attempt_0/{rank}/stdout.log"].startswith(f"{rank} starts, restart 0\n")
        assert ours.files[f"attempt_1/{rank}/stdout.log"] == f"{rank} starts, restart 1\n"


def test_what_a_rank_said_last_is_in_the_error_although_it_is_redirected(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys\nprint('what it did')\nsys.stderr.write('why it fails\\n')\nos.abort()\n"
    )
    done = everstep(tmp_path / "run", "--name=fails", "-r=3", "../fails.py")
    assert done.code == 1
    (out,) = (tmp_path / "run" / "runs" / "fails" / "logs").glob("fails_*/attempt_0/0/stdout.log")
    assert out.read_text() == "what it did\n"
    error = out.with_name("stderr.log").read_text()
    assert error.startswith("why it fails\nFatal Python error: Aborted")
    assert f"  | {error.splitlines()[-1]}" in done.output
    logged = CliRunner().invoke(main, ["logs", str(tmp_path / "run" / "runs" / "fails")])
    assert logged.output.splitlines() == [
        f"[rank 0] everstep: {path.stem} is redirected to {path}"
        for path in (out, out.with_name("stderr.log"))
    ]


def test_ranks_that_are_filtered_out_are_in_the_logs_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    done = everstep(
        tmp_path / "run", "--name=quiet", "--nproc-per-node=2", "--local-ranks-filter=1", "../prints.py"
    )
    assert done.code == 0, done.output
    assert {line[0] for line in done.shown} == {"1"}
    logged = CliRunner().invoke(main, ["logs", str(tmp_path / "run" / "runs" / "quiet"), "--rank=0"])
    assert "[rank 0] 0 child err" in logged.output.splitlines()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--redirects", "4"], "'-r' / '--redirects': '4' names no streams. Write 1 for stdout"),
        (["-t", "0:1;1:2"], "'-t' / '--tee': '0:1;1:2' names no streams"),
        (["--tee="], "'' names no streams"),
        (
            ["--local_ranks_filter=0-3"],
            "'--local-ranks-filter': '0-3' isn't a list of local ranks. Write 0,1",
        ),
    ],
)
def test_streams_and_ranks_that_can_not_be_are_named(options: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["run", *options, __file__])
    assert result.exit_code == 2
    assert says in result.output


def test_a_log_folder_that_can_not_be_written_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    done = everstep(tmp_path / "run", "--log-dir=../train.py/logs", "--tee=3", "../train.py")
    assert done.code == 1
    assert f"everstep: --log-dir {tmp_path}/train.py/logs can't be written: Not a directory" in done.output
    assert "Give a folder in which you can create files" in done.output
    assert not (tmp_path / "run" / "started").exists()


def test_a_log_file_that_a_host_can_not_make_ends_the_run_with_that_cause(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    folder = str(tmp_path)
    while len(folder) < 4000:  # of the 4096 that a path may have
        folder += "/" + "d" * min(200, 3999 - len(folder))
    options = (f"--name={'n' * 200}", f"--log-dir={folder}", "--tee=1")
    done = everstep(tmp_path / "run", *options, "../train.py")
    assert done.code == 1
    assert "/attempt_0/0/stdout.log can't be opened: File name too long" in done.output
    assert "--log-dir" in done.output
    assert not (tmp_path / "run" / "started").exists()


def test_every_option_of_torchrun_is_taken_or_refused_by_name_and_is_in_the_docs() -> None:
    from torch.distributed.run import get_args_parser

    page = (Path(__file__).parents[2] / "docs" / "from-torchrun.md").read_text()
    for action in get_args_parser()._actions:
        for option in action.option_strings:
            value = [] if action.nargs == 0 else ["1"]
            result = CliRunner().invoke(main, ["run", option, *value, "no-such-script.py"])
            if option in ("-h", "--help"):
                assert result.output.startswith("Usage:")
            else:
                refused = f"{option.replace('_', '-')} isn't an option here."
                taken = re.search("there is no (file|module) 'no-such-script.py'", result.output)
                assert taken or refused in result.output, (option, result.output)
                assert re.search(f"`{option.replace('_', '-')}[` ]", page), option
