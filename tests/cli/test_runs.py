"""``everstep runs``, ``show``, ``events`` and ``stop`` on real runs."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import everstep
from everstep.cli.main import main
from everstep.control import commands as c
from everstep.failures import Failure, Kind
from everstep.journal import journal, records
from everstep.journal.history import read_history
from everstep.observe.reading import Tail
from everstep.observe.registry import LiveRun, LiveWorker, live_runs, publish_run
from everstep.storage.asynchronous import ImmediateStore, complete
from everstep.storage.store import open_store
from processes import LIMIT_S, wait_for

SCRIPT = textwrap.dedent(
    """
    import sys, time
    import everstep

    def train():
        while True:
            everstep.report({"step": 1})
            time.sleep(0.01)

    name, storage = sys.argv[1:]
    everstep.Trainer(
        train,
        scaling_config=everstep.ScalingConfig(num_workers=1),
        run_config=everstep.RunConfig(
            name=name,
            storage_path=storage,
            deadlines=everstep.Deadlines(orphan_s=0, last_checkpoint_s=0.1),
        ),
    ).fit()
    """
)


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ev", dir="/tmp")  # short: sockets live below it
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    yield
    shutil.rmtree(folder)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def finished(storage: Path, name: str = "done") -> Path:
    """A run of three reports, two of them with checkpoints."""

    def train():
        for step, loss in enumerate((2.0, math.nan, -math.inf)):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "model").write_text(str(step))
                checkpoint = everstep.Checkpoint(folder) if step else None
                everstep.report({"step": step, "loss": loss}, checkpoint=checkpoint)
        return {"answer": 42}

    fit(storage, name, train)
    return storage / name


def fit(storage: Path, name: str, train) -> None:
    everstep.Trainer(
        train,
        scaling_config=everstep.ScalingConfig(num_workers=0),
        run_config=everstep.RunConfig(name=name, storage_path=str(storage)),
    ).fit()


def failed(storage: Path, name: str = "broken") -> Path:
    def train():
        raise ValueError("no such luck")

    with pytest.raises(everstep.TrainingFailedError):
        fit(storage, name, train)
    return storage / name


class Live:
    """A run in a process of its own."""

    def __init__(self, storage: Path, name: str = "live") -> None:
        script = storage.parent / "script.py"
        script.write_text(SCRIPT)
        self.folder = storage / name
        self.process = subprocess.Popen([sys.executable, str(script), name, str(storage)])
        wait_for(lambda: name in live_runs(), f"{name} to start")
        wait_for(lambda: read_history(open_store(self.folder)).metrics, "its first metrics")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


@pytest.fixture
def live(storage: Path) -> Iterator[Live]:
    started = Live(storage)
    yield started
    started.kill()


# ---------------------------------------------------------------------- runs and show


def test_runs_lists_what_is_a_run_and_leaves_out_what_is_not(storage: Path):
    finished(storage)
    failed(storage)
    (storage / "notes").mkdir()
    (storage / "notes" / "file").write_text("x")
    done = cli("runs", str(storage))
    assert done.exit_code == 0, done.output
    head, *rows = done.output.splitlines()
    assert head.split() == [
        "NAME",
        "STATE",
        "ATTEMPTS",
        "CHECKPOINTS",
        "NEWEST",
        "REPORTS",
        "LAST",
        "WRITTEN",
    ]
    assert [row.split()[:2] for row in rows] == [["broken", "failed"], ["done", "finished"]]
    assert rows[1].split()[2:6] == ["1", "2", "checkpoint_0001_000003", "3"]
    assert rows[1].split()[6] == time.strftime("%Y-%m-%d")


def test_a_place_without_runs_says_so(storage: Path):
    assert "No run is in" in cli("runs", str(storage)).output
    missing = cli("runs", str(storage / "typo"))
    assert (missing.exit_code, missing.output) == (1, f"Error: there is no folder {storage / 'typo'}\n")


def test_runs_lists_those_in_the_default_place_if_none_is_given(
    storage: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("everstep.config.DEFAULT_STORAGE_PATH", str(storage))
    finished(storage)
    assert cli("runs").output.splitlines()[1].startswith("done  finished")


def test_a_storage_path_in_the_place_of_a_run_names_the_runs_in_it(storage: Path):
    folder = finished(storage)
    shown = cli("show", str(storage))
    assert shown.exit_code == 1
    assert f"{storage} is not a run, but a storage path with runs in it" in shown.output
    assert str(folder) in shown.output


def test_show_writes_a_page_with_what_the_run_was(storage: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    done = cli("show", str(finished(storage)), "--html", str(page))
    assert (done.exit_code, done.output) == (0, f"wrote {page}\n")
    found = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text()).group(1))
    assert (found["name"], found["state"], found["metrics"]["rows"]) == ("done", "finished", 3)
    assert [lane["rank"] for lane in found["timeline"]["lanes"]] == [0]
    assert found["checkpoints"]["kept"] == 2


def test_a_page_that_cannot_be_written_is_said_in_a_line(storage: Path, tmp_path: Path):
    page = tmp_path / "missing" / "page.html"
    done = cli("show", str(finished(storage)), "--html", str(page))
    assert (done.exit_code, done.output) == (1, f"Error: can't write {page}: No such file or directory\n")


def test_a_run_says_where_its_workers_are(live: Live):
    (place,) = read_history(open_store(live.folder)).places.values()
    (worker,) = live_runs()["live"].workers
    assert (place.rank, place.host, place.slice) == (worker.rank, worker.host, worker.slice)


def test_a_run_that_lives_names_its_owner_and_a_killed_one_is_interrupted(storage: Path, live: Live):
    state = f"running under lease 1 by process {live.process.pid} on {os.uname().nodename}"
    assert state in cli("runs", str(storage)).output
    assert state in cli("show", "live").output  # by name: it is live on this machine
    live.kill()
    assert "interrupted" in cli("runs", str(storage)).output
    wait_for(lambda: "live" not in live_runs(), "the end of its worker, which nobody drives")
    shown = cli("show", str(live.folder)).output
    assert "state         interrupted\n" in shown
    assert "the same command again resumes it" in shown


def test_a_run_whose_workers_outlive_its_driver_says_so_and_how_to_take_them_over(storage: Path, live: Live):
    live.kill()
    wait_for(lambda: "live" not in live_runs(), "the end of its worker, which nobody drives")
    here = LiveWorker(0, os.getpid(), "host", "slice")  # this process stands for one that trains on
    publish_run(LiveRun("live", str(live.folder), live.process.pid, 1, [here]))
    assert "interrupted, 1 worker trains on" in cli("runs", str(storage)).output
    shown = cli("show", str(live.folder)).output
    assert "state         interrupted, 1 worker trains on\n" in shown
    assert "the same command again takes its workers over, and no step is lost" in shown
    assert "resumes it" not in shown
    found = json.loads(cli("show", str(live.folder), "--json").output)
    assert (found["state"], found["workers_left"]) == ("interrupted", 1)


def test_show_tells_state_checkpoints_and_metrics(storage: Path):
    done = cli("show", str(finished(storage)))
    assert done.exit_code == 0, done.output
    for expected in (
        f"address       {storage / 'done'}",
        "state         finished",
        "reports       3; the last: step=2, loss=-inf",
        "checkpoints: 2\n  checkpoint_0001_000002  step=1, loss=nan\n",
        "recoveries: 0",
    ):
        assert expected in done.output


def test_show_names_the_first_cause_of_a_failed_run(storage: Path):
    assert "first cause   ValueError: no such luck" in cli("show", str(failed(storage))).output


def test_show_tells_each_recovery_in_a_line(storage: Path):
    folder = finished(storage)
    store = open_store(folder)
    cause = Failure(Kind.SIGNAL, 1.0, "killed by SIGKILL", rank=3)
    decided = c.RecoveryDecided(1.0, cause, "max_failures", 1, 3, (), 0.0)
    recovered = c.Recovered(2.0, 2, c.Rung.RESTART_IN_PLACE, cause, "3 of 4", 1, *([0.1] * 8))
    data = records.encode(decided) + records.encode(recovered)
    log = store.child(journal.FOLDER)
    assert log.create(journal.key_of(complete(journal.scan_journal(ImmediateStore(log))).next), data)
    shown = cli("show", str(folder)).output
    assert "max_failures: 1 spent of 3" in shown
    assert "recoveries: 1\n" in shown
    assert "rank 3: killed by SIGKILL" in shown


def test_events_says_who_hangs_and_where_the_stacks_are(storage: Path):
    folder = finished(storage)
    log = open_store(folder).child(journal.FOLDER)
    hang = records.encode(c.HangSeen(1.0, 1, (3,), "no progress", "hangs/0001-0001.txt", "restart"))
    assert log.create(journal.key_of(complete(journal.scan_journal(ImmediateStore(log))).next), hang)
    said = cli("events", str(folder)).output
    assert "rank 3 hangs (restart): stacks in hangs/0001-0001.txt\n" in said


@pytest.mark.parametrize("command", ["show", "events", "stop"])
def test_what_is_not_a_run_is_said_to_be_none(storage: Path, command: str):
    done = cli(command, str(storage))
    assert done.exit_code == 1
    assert "is not a run" in done.output


def test_a_name_alone_finds_a_run_in_the_default_storage_unless_it_is_ambiguous(
    storage: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(storage.parent))
    default = storage.parent / "everstep_results"
    finished(default)
    assert cli("show", "done").exit_code == 0
    finished(storage)
    monkeypatch.chdir(storage)
    done = cli("show", "done")
    assert done.exit_code == 1
    assert str(default / "done") in done.output
    assert str(storage / "done") in done.output


# ---------------------------------------------------------------------- events


def test_events_tells_every_record_with_the_time_of_day(storage: Path):
    folder = finished(storage)
    lines = cli("events", str(folder)).output.splitlines()
    assert len(lines) == len(list(journal.read(folder)))
    assert lines[0].startswith(time.strftime("%Y-%m-%d "))
    assert "opened by process" in lines[0]
    assert lines[-1].endswith("ended: finished")


def test_events_as_json_has_every_record_with_its_type_and_fields(storage: Path):
    folder = finished(storage)
    rows = [
        json.loads(line, parse_constant=pytest.fail)
        for line in cli("events", str(folder), "--json").output.splitlines()
    ]
    assert len(rows) == len(list(journal.read(folder)))
    assert rows[0]["type"] == "Opened"
    assert abs(rows[0]["time"] - time.time()) < 60
    assert [row["rows"][0]["loss"] for row in rows if row["type"] == "Metrics"] == [2.0, "NaN", "-Infinity"]
    assert [row["metrics"]["step"] for row in rows if row["type"] == "Committed"] == [1, 2]
    assert rows[-1]["type"] == "Closed"
    assert rows[-1]["value"] == {"answer": 42}


def write(store, number: int, *some: records.AnyRecord) -> None:
    assert store.child(journal.FOLDER).create(journal.key_of(number), b"".join(map(records.encode, some)))


def test_following_a_journal_that_is_compacted_meanwhile_repeats_and_skips_nothing(
    storage: Path,
):
    store = open_store(storage / "run")
    log = journal.Journal(ImmediateStore(store.child(journal.FOLDER)), 1, 1, [], compact_after=7)
    written = 1000

    def drive() -> None:
        for number in range(written):
            log.append(records.Renewed(float(number)))
            if number % 3 == 0:
                complete(log.flush())
            if log.is_long:
                complete(log.compact())
        complete(log.flush())

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    tail, seen = Tail(store), []
    while thread.is_alive():
        seen += [record.at for record in tail.news() if isinstance(record, records.Renewed)]
    thread.join()
    seen += [record.at for record in tail.news() if isinstance(record, records.Renewed)]
    assert seen == [float(number) for number in range(written)]


def test_what_comes_behind_a_hole_is_read(storage: Path):
    store = open_store(storage / "run")
    write(store, 1, records.Renewed(1.0))
    write(store, 3, records.Renewed(3.0))
    assert list(Tail(store).news()) == [records.Renewed(1.0), records.Renewed(3.0)]


def test_follow_ends_with_the_run(storage: Path, live: Live):
    follower = subprocess.Popen(
        [sys.executable, "-m", "everstep.cli.main", "events", str(live.folder), "--follow", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    live.process.send_signal(signal.SIGINT)
    output, _ = follower.communicate(timeout=LIMIT_S)
    assert follower.returncode == 0
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) == len(list(journal.read(live.folder)))
    assert rows[-1]["type"] == "Closed"
    assert rows[-1]["outcome"] == "stopped"


def test_ctrl_c_ends_follow_quietly(storage: Path, live: Live):
    follower = subprocess.Popen(
        [sys.executable, "-m", "everstep.cli.main", "events", str(live.folder), "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    assert "opened by" in follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    _, errors = follower.communicate(timeout=LIMIT_S)
    assert (follower.returncode, errors) == (0, "")


# ---------------------------------------------------------------------- stop


def test_stop_ends_a_run_and_says_how(storage: Path, live: Live):
    done = cli("stop", str(live.folder))
    assert done.exit_code == 0, done.output
    assert f"waiting for process {live.process.pid}" in done.output
    assert done.output.endswith("live has ended: stopped\n")
    live.process.wait(LIMIT_S)
    again = cli("stop", str(live.folder))
    assert again.exit_code == 1
    assert "live has ended already: stopped" in again.output


def test_stop_without_waiting_leaves_the_request_and_the_run_ends(storage: Path, live: Live):
    done = cli("stop", "live", "--no-wait")
    assert done.exit_code == 0, done.output
    assert open_store(live.folder).exists("requests/stop-1")
    live.process.wait(LIMIT_S)
    assert read_history(open_store(live.folder)).outcome == "stopped"


def test_stop_of_a_run_whose_driver_is_dead_says_how_to_go_on(storage: Path, live: Live):
    live.kill()
    done = cli("stop", str(live.folder))
    assert done.exit_code == 1
    assert "Running the script again resumes it" in done.output
    assert "orphan time-out" in done.output
    assert not open_store(live.folder).exists("requests/stop-1")


def test_stop_gives_up_on_a_driver_that_does_not_answer(storage: Path, live: Live):
    live.process.send_signal(signal.SIGSTOP)
    try:
        done = cli("stop", str(live.folder), "--timeout", "0.2")
        assert done.exit_code == 1
        assert "has not ended within 0.2 s. The request stays" in done.output
    finally:
        live.process.send_signal(signal.SIGCONT)
    live.process.wait(LIMIT_S)
    assert read_history(open_store(live.folder)).outcome == "stopped"
