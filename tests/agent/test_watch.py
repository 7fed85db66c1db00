"""What an agent sees of its workers from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.agent.watch import Watched
from everstep.backend.base import Member
from everstep.health.vitals import StackPlace, Stage, Vitals
from everstep.process import kernel
from everstep.protocol import stacks, wire
from everstep.protocol.progress import Page, Progress, Seen, shared_memory
from everstep.topology.placement import Assignment
from processes import wait_for

SPEC = wire.WorkerSpec(
    "run",
    "/run",
    1,
    0,
    Assignment(0, "host", 0, 1, 0, 1, 1, "slice", 0, 1, 0, 1, 0, 1),
    Member(0, 1, 0, 1, 0, 1),
    None,
    "",
    "",
    0,
    1.0,
    1.0,
    1.0,
    1.0,
    False,
    False,
)


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page(shared_memory())
    yield page
    page.close()


@pytest.fixture
def idle() -> Iterator[int]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        wait_for(lambda: kernel.state_of(process.pid) == "S", "a process that waits")
        yield process.pid
        process.kill()


def look(watched: Watched, pid: int, times: int = 1) -> None:
    for _ in range(times):
        if watched.look(pid, 1.0):
            watched.account(kernel.used_by({pid})[pid])


def vitals(watched: Watched) -> Vitals:
    return watched.vitals(SPEC, os.getpid())


def test_progress_is_seen_by_whoever_shares_the_memory(page: Page) -> None:
    progress = Progress(Page(os.dup(page.fd)))
    progress.enter(Stage.FIRST_STEP)
    progress.reported()
    assert (Seen(page).stage, Seen(page).reports) == (Stage.TRAINING, 1)
    with progress.during(Stage.PAUSE, "eval", 60.0):
        assert (Seen(page).stage, Seen(page).label, Seen(page).allowed_s) == (Stage.PAUSE, "eval", 60.0)
        progress.reported()
        assert Seen(page).stage is Stage.PAUSE
    assert (Seen(page).stage, Seen(page).label, Seen(page).allowed_s) == (Stage.TRAINING, "", 0.0)


def test_a_restore_that_turns_into_training_stays_training(page: Page) -> None:
    progress = Progress(Page(os.dup(page.fd)))
    progress.enter(Stage.FIRST_STEP)
    with progress.during(Stage.RESTORE):
        progress.reported()
    assert Seen(page).stage is Stage.TRAINING


def test_a_process_that_does_nothing_is_quiet_and_still(page: Page, idle: int) -> None:
    watched, progress = Watched(page), Progress(Page(os.dup(page.fd)))
    progress.enter(Stage.TRAINING)
    look(watched, idle, 12)
    found = vitals(watched)
    assert found.quiet_s == pytest.approx(11.0, abs=0.5)
    assert found.still_s >= 9.0


def test_what_has_been_quiet_before_is_known_as_usual(page: Page, idle: int) -> None:
    watched, progress = Watched(page), Progress(Page(os.dup(page.fd)))
    progress.enter(Stage.TRAINING)
    for _ in range(3):
        look(watched, idle, 6)
        progress.beat()
    look(watched, idle)
    found = vitals(watched)
    assert found.quiet_s < 1.0
    assert found.usual_s == pytest.approx(6.0, abs=0.5)
    assert found.lull_s >= 4.0


def test_steps_that_are_quicker_than_an_agent_looks_are_known_by_their_number(page: Page, idle: int) -> None:
    watched, progress = Watched(page), Progress(Page(os.dup(page.fd)))
    progress.reported()
    look(watched, idle, 9)
    assert vitals(watched).step_s == 0.0, "the first says nothing of those after it"
    for steps in (1, 20, 20):
        for _ in range(steps):
            progress.reported()
        look(watched, idle)
    look(watched, idle, 5)
    assert vitals(watched).step_s == pytest.approx(0.05, abs=0.01)


def test_time_without_a_processor_is_not_silence(
    page: Page, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = iter(range(100))
    monkeypatch.setattr(kernel, "scheduled", lambda pid: kernel.Scheduled(0.0, float(next(starved)), 0))
    watched = Watched(page)
    look(watched, idle, 20)
    assert vitals(watched).quiet_s <= 1.0


def test_a_child_that_computes_is_a_sign_of_life() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
        before = kernel.used_by({process.pid})[process.pid]
        wait_for(
            lambda: kernel.used_by({process.pid})[process.pid].seconds > before.seconds + 0.5,
            "what the child has used",
        )
        os.killpg(process.pid, signal.SIGKILL)


def test_a_stack_that_is_taken_while_python_is_locked_names_the_line(tmp_path: Path) -> None:
    script = tmp_path / "locked.py"
    script.write_text(
        "import ctypes, sys\n"
        "from everstep.protocol.progress import Page, Progress\n"
        "progress = Progress(Page(int(sys.argv[1])))\n"
        "def locks():\n"
        "    mutex = ctypes.create_string_buffer(256)\n"
        "    ctypes.PyDLL(None).pthread_mutex_lock(mutex)\n"
        "    ctypes.PyDLL(None).pthread_mutex_lock(mutex)\n"
        "print('ready', flush=True)\n"
        "locks()\n"
    )
    page = Page(shared_memory())
    command = [sys.executable, str(script), str(page.fd)]
    with subprocess.Popen(command, pass_fds=[page.fd], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        page.forget_stacks()
        wait_for(lambda: kernel.state_of(process.pid) == "S", "the lock")
        kernel.send_signal(process.pid, stacks.SIGNAL)
        wait_for(lambda: "in <module>" in page.stacks(), "its stacks")
        found = stacks.parse(page.stacks(), Seen(page).main_thread)
        process.kill()
    page.close()
    assert stacks.line_of(found.main) == f"{script}:7 in locks"
    assert stacks.place_of(found.main) is StackPlace.WORKING


def test_a_thread_that_waits_in_pythons_own_modules_waits_for_something() -> None:
    import threading

    wait = stacks.Frame(threading.__file__, 320, "wait")
    mine = stacks.Frame("/home/me/train.py", 3, "next_batch")
    reduce = stacks.Frame("/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", 9, "all_reduce")
    assert stacks.place_of((wait, mine)) is StackPlace.WAITING
    assert stacks.place_of((mine,)) is StackPlace.WORKING
    assert stacks.place_of((reduce, mine)) is StackPlace.COLLECTIVE
    assert stacks.place_of((wait, reduce, mine)) is StackPlace.COLLECTIVE
    assert stacks.place_of(()) is StackPlace.UNKNOWN
    assert stacks.line_of((wait, reduce, mine)) == "/home/me/train.py:3 in next_batch"


def test_py_spy_finds_the_stack_of_a_process_that_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text("import os, signal\ndef stops():\n    os.kill(os.getpid(), signal.SIGSTOP)\nstops()\n")
    with subprocess.Popen([sys.executable, str(script)]) as process:
        wait_for(lambda: kernel.state_of(process.pid) == "T", "a process that is stopped")
        found = stacks.spy(process.pid)
        process.kill()
    assert stacks.line_of(found.main) == f"{script}:3 in stops"


def test_a_heartbeat_costs_next_to_nothing(page: Page) -> None:
    progress = Progress(Page(os.dup(page.fd)))
    began, times = time.process_time(), 100_000
    for _ in range(times):
        progress.beat()
    print(f"{(time.process_time() - began) / times * 1e9:.0f} ns for one heartbeat")
    assert Seen(page).marks == times
