"""No process outlives what it belongs to: a worker's children, an agent's workers, a template's forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import FailureConfig, Result, RunConfig, Trainer, WorkerGroupError, get_context
from processes import LIMIT_S, alive, ours, wait_for


def spawning(config: dict[str, Any]) -> None:
    """Start one child in the worker's session and one that has left it, note their pids, then wait to be
    broken.
    """
    context = get_context()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    daemons = [daemonised(lambda: os.execv(sleep[0], sleep)), daemonised(lambda: time.sleep(600))]
    path = Path(config["pids"]) / f"{context.get_attempt()}"
    path.with_suffix(".tmp").write_text(
        " ".join(map(str, [os.getpid(), os.getppid(), *(c.pid for c in children), *daemons]))
    )
    path.with_suffix(".tmp").rename(path)
    if context.get_attempt() == 1:
        threading.Event().wait()
    for child in children:
        child.kill()
    for daemon in daemons:
        os.kill(daemon, signal.SIGKILL)


def daemonised(body: Callable[[], None]) -> int:
    """Run it in a process that has left its parent and its session, as daemons do. Gives its pid."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            body()
            os._exit(0)
        os.write(write, str(daemon).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))


def run_and_break(tmp_path: Path, break_it: Any, **failures: int) -> tuple[list[int], list[int], Result]:
    outcome: list[Any] = []

    def fit() -> None:
        try:
            outcome.append(
                Trainer(
                    spawning,
                    train_loop_config={"pids": str(tmp_path)},
                    run_config=RunConfig(
                        name="tree",
                        storage_path=str(tmp_path / "runs"),
                        failure_config=FailureConfig(**failures),
                    ),
                ).fit()
            )
        except everstep.TrainingFailedError as error:
            outcome.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    wait_for(lambda: (tmp_path / "1").exists(), "the worker and its children")
    first = list(map(int, (tmp_path / "1").read_text().split()))
    break_it(*first)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    second = list(map(int, (tmp_path / "2").read_text().split()))
    return first, second, outcome[0]


def check_gone(pids: list[int]) -> None:
    for pid in pids:
        wait_for(lambda pid=pid: not alive(pid), f"the end of process {pid}")


def test_a_killed_worker_takes_its_whole_process_tree_along(tmp_path: Path) -> None:
    first, second, _ = run_and_break(
        tmp_path, lambda worker, template, *children: os.kill(worker, signal.SIGKILL), max_failures=1
    )
    check_gone([first[0], *first[2:]])
    assert first[1] == second[1], "the template was kept"


def test_a_worker_that_is_killed_while_its_template_is_stopped_is_noticed(tmp_path: Path) -> None:
    def stop_and_kill(worker: int, template: int, *children: int) -> None:
        os.kill(template, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)

    first, second, _ = run_and_break(tmp_path, stop_and_kill, max_failures=1)
    check_gone(first)
    assert first[1] != second[1], "another template"


def test_a_killed_template_is_a_failure_with_a_name_and_is_replaced(tmp_path: Path) -> None:
    first, second, _ = run_and_break(
        tmp_path, lambda worker, template, *children: os.kill(template, signal.SIGKILL), max_failures=1
    )
    check_gone(first)
    assert first[1] != second[1], "another template"


def test_a_killed_template_without_budget_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match="the template process died \\(killed by SIGKILL\\)"):
        run_and_break(
            tmp_path, lambda worker, template, *children: os.kill(template, signal.SIGKILL), max_failures=0
        )
    check_gone(list(map(int, (tmp_path / "1").read_text().split())))


def agent_of(template: int) -> int:
    return int(Path(f"/proc/{template}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_killed_agent_takes_everything_along_and_the_machine_gets_a_new_one(tmp_path: Path) -> None:
    def kill_agent(worker: int, template: int, *children: int) -> None:
        (agent,) = [pid for pid, command in ours().items() if "-m everstep.agent " in command]
        assert agent == agent_of(template)
        os.kill(agent, signal.SIGKILL)

    first, _, _ = run_and_break(tmp_path, kill_agent, max_failures=1)
    check_gone(first)


def kill_together(*pids: int) -> None:
    """None of them sees another one die."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_an_agent_and_a_template_killed_together_leave_nothing_behind(tmp_path: Path) -> None:
    first, _, _ = run_and_break(
        tmp_path,
        lambda worker, template, *children: kill_together(agent_of(template), template),
        max_failures=1,
    )
    check_gone(first)


def test_a_killed_guardian_takes_everything_along(tmp_path: Path) -> None:
    first, _, _ = run_and_break(
        tmp_path,
        lambda worker, template, *children: os.kill(agent_of(agent_of(template)), signal.SIGKILL),
        max_failures=1,
    )
    check_gone(first)


def test_what_outlives_all_that_watched_it_is_gone_before_the_machine_is_used_again(tmp_path: Path) -> None:
    def kill_all(worker: int, template: int, *children: int) -> None:
        agent = agent_of(template)
        kill_together(agent_of(agent), agent, template)

    first, _, _ = run_and_break(tmp_path, kill_all, max_failures=1)
    assert not [pid for pid in first if alive(pid)]
