"""Ctrl+C, SIGTERM, a notebook's stop button: the workers stop, nothing is left over, and the user is told how
to go on.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from processes import LIMIT_S, alive, wait_for

from .scripts import start


def wait_until_up(folder: Path, process: subprocess.Popen[str], workers: int = 2) -> list[int]:
    def up() -> bool:
        assert process.poll() is None, process.communicate()
        return all((folder / f"up-{rank}").exists() for rank in range(workers))

    wait_for(up, "workers")
    return [int((folder / f"up-{rank}").read_text() or 0) for rank in range(workers)]


def test_ctrl_c_lets_the_workers_clean_up_and_exits_with_130(tmp_path: Path) -> None:
    process = start(tmp_path, "trainer().fit()")
    pids = wait_until_up(tmp_path, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (130, -signal.SIGINT)  # a shell shows either as 130
    assert "resume slow" in errors
    assert "Traceback" not in errors
    assert all((tmp_path / f"cleaned-{rank}").exists() for rank in range(2))
    assert not any(alive(pid) for pid in pids)


def test_ctrl_c_twice_ends_workers_that_do_not_listen_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, "trainer(stubborn=True).fit()")
    pids = wait_until_up(tmp_path, process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    for line in process.stderr:
        if "Ctrl+C again" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode in (130, -signal.SIGINT)
    assert not any(alive(pid) for pid in pids)


def test_sigterm_at_the_driver_does_the_same_with_143(tmp_path: Path) -> None:
    process = start(tmp_path, "trainer().fit()")
    pids = wait_until_up(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143
    assert "resume slow" in errors
    assert all((tmp_path / f"cleaned-{rank}").exists() for rank in range(2))
    assert not any(alive(pid) for pid in pids)


def test_a_driver_in_the_background_heeds_no_ctrl_c_and_stops_at_sigterm(tmp_path: Path) -> None:
    # So a shell starts what a script has in the background: Ctrl+C is meant for others.
    process = start(
        tmp_path, "trainer().fit()", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    wait_until_up(tmp_path, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143
    assert "Ctrl+C" not in errors
    assert "resume slow" in errors


def test_a_notebook_cell_in_a_thread_can_be_stopped_while_the_kernel_lives_on(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        import ctypes

        outcome = []

        def cell():
            try:
                trainer().fit()
            except KeyboardInterrupt as error:
                outcome.append(str(error))

        thread = threading.Thread(target=cell, daemon=True)
        thread.start()
        while not all((HERE / f"up-{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        interrupt = ctypes.py_object(KeyboardInterrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), interrupt)
        thread.join()
        print("kernel lives;", outcome[0])
        """,
    )
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert "kernel lives; Run the same command again to resume slow from the beginning" in output, "unsaved"
    assert all((tmp_path / f"cleaned-{rank}").exists() for rank in range(2))


def test_an_asyncio_loop_in_the_calling_thread_is_no_obstacle(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        import asyncio

        async def cell():
            run_config = RunConfig(storage_path=str(HERE / "runs"))
            return Trainer(lambda: 5, run_config=run_config).fit().return_value

        print("value", asyncio.run(cell()))
        """,
    )
    output, errors = process.communicate(timeout=LIMIT_S)
    assert "value 5" in output, errors


def test_a_driver_killed_without_a_word_leaves_nothing_behind_for_long(tmp_path: Path) -> None:
    process = start(tmp_path, "trainer(orphan_s=0).fit()")
    pids = wait_until_up(tmp_path, process)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    for pid in pids:
        wait_for(lambda pid=pid: not alive(pid), "the end of an orphan")


def test_an_agent_killed_takes_its_workers_process_trees_along(tmp_path: Path) -> None:
    from processes import ours

    process = start(tmp_path, "trainer().fit()")
    wait_until_up(tmp_path, process)
    (agent,) = [pid for pid, command in ours().items() if "everstep.agent " in command]
    import os

    os.kill(agent, signal.SIGKILL)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "its agent died" in errors
