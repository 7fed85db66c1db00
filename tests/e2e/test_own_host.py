"""A run on this machine alone: its agent may be killed at any time, or fall silent, and is never doubled."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep import ControllerError, FailureConfig, RunConfig, Trainer
from everstep.engine.local.cluster import LocalCluster, runtime_folder
from everstep.engine.local.engine import LocalEngine
from everstep.topology.slices import SliceName
from processes import LIMIT_S, alive, ours, wait_for

from .test_process_trees import agent_of
from .test_worker_deaths import Fit


def counts_those_beside_it(config: dict[str, Any]) -> int:
    """Wait to be broken at first; after that, say how many of the first attempt still live."""
    here = Path(config["here"])
    if not (here / "first").exists():
        (here / "first.tmp").write_text(f"{os.getpid()} {os.getppid()}")
        (here / "first.tmp").rename(here / "first")
        threading.Event().wait()
    return sum(alive(int(pid)) for pid in (here / "first").read_text().split())


def test_an_agent_that_falls_silent_is_gone_with_all_it_ran_before_the_machine_is_used_again(
    tmp_path: Path,
) -> None:
    fit = Fit(
        lambda: Trainer(
            counts_those_beside_it,
            train_loop_config={"here": str(tmp_path)},
            run_config=RunConfig(
                storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)
            ),
        )
    )
    wait_for(lambda: (tmp_path / "first").exists(), "the worker")
    worker, template = map(int, (tmp_path / "first").read_text().split())
    agent = agent_of(template)
    os.kill(agent, signal.SIGSTOP)
    assert fit.done().return_value == 0, "workers of the first attempt that trained beside the second"
    assert not alive(agent)
    assert not alive(worker)


AGAIN = """
from e2e.test_own_host import counts_those_beside_it

print("beside it:", Trainer(
    counts_those_beside_it,
    train_loop_config={"here": str(HERE)},
    run_config=RunConfig(name="again", storage_path=str(HERE / "runs")),
).fit().return_value)
"""


def test_an_agent_that_is_silent_when_a_new_driver_comes_is_replaced_and_not_doubled(tmp_path: Path) -> None:
    from .scripts import start

    first = start(tmp_path, AGAIN)
    wait_for(lambda: (tmp_path / "first").exists(), "the worker")
    agent = agent_of(int((tmp_path / "first").read_text().split()[1]))
    first.kill()
    first.communicate()
    os.kill(agent, signal.SIGSTOP)
    second = start(tmp_path, AGAIN, {"EVERSTEP_TAKE_OVER_S": "2"})
    output, errors = second.communicate(timeout=LIMIT_S)
    assert "beside it: 0" in output, errors
    assert not alive(agent)


def keep_everything(_: Path) -> None:
    pass


def remove_the_runtime_folder(_: Path) -> None:
    shutil.rmtree(runtime_folder())


def remove_the_run(folder: Path) -> None:
    shutil.rmtree(folder / "runs")


@pytest.mark.parametrize(
    ("damage", "session"),
    [(keep_everything, "another"), (remove_the_runtime_folder, "this"), (remove_the_run, "this")],
)
def test_workers_that_a_new_driver_has_no_way_to_reach_are_gone_before_the_machine_is_used_again(
    tmp_path: Path, damage: Callable[[Path], None], session: str
) -> None:
    """Their sockets are in the runtime folder of another session, or were removed with it; or they obey only
    leases of a journal that was removed.
    """
    from .scripts import start

    first = start(tmp_path, AGAIN)
    wait_for(lambda: (tmp_path / "first").exists(), "the worker")
    first.kill()
    first.communicate()
    damage(tmp_path)
    other = tempfile.mkdtemp(prefix="ev") if session == "another" else os.environ["XDG_RUNTIME_DIR"]
    try:
        again = start(tmp_path, AGAIN, env={"XDG_RUNTIME_DIR": other})
        output, errors = again.communicate(timeout=LIMIT_S)
        assert "beside it: 0" in output, errors
    finally:
        if session == "another":
            shutil.rmtree(other)


def test_workers_are_found_again_whichever_link_leads_to_their_run(tmp_path: Path) -> None:
    from .scripts import start

    (tmp_path / "linked").symlink_to(tmp_path / "runs")
    first = start(tmp_path, AGAIN)
    wait_for(lambda: (tmp_path / "first").exists(), "the worker")
    first.kill()
    first.communicate()
    again = start(tmp_path, AGAIN.replace('"runs"', '"linked"'))
    assert again.stderr is not None
    assert any("took over 1 workers" in line for line in again.stderr)
    again.terminate()
    again.communicate()


class ComesToLife(LocalEngine):
    """Hears of a silent agent again at the very moment at which the machine is used anew."""

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        for link in self.links.values():
            link.alive = True
        super().reserve(reservation, slices)


def test_an_agent_that_answers_when_it_is_too_late_is_no_capacity(tmp_path: Path) -> None:
    engine = ComesToLife()
    fit = Fit(
        lambda: Trainer(
            counts_those_beside_it,
            train_loop_config={"here": str(tmp_path)},
            run_config=RunConfig(
                storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)
            ),
            engine=engine,
        )
    )
    wait_for(lambda: (tmp_path / "first").exists(), "the worker")
    os.kill(agent_of(int((tmp_path / "first").read_text().split()[1])), signal.SIGSTOP)
    assert fit.done().return_value == 0
    assert [host.id for host in engine._last_view if host.alive] == ["slice-1-host"]


class Assassin:
    """Kills the first agents before they are up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        wait = LocalCluster._wait_ready

        def wait_ready(cluster: LocalCluster, host: str) -> None:
            if self.left:
                self.left -= 1
                os.kill(cluster.hosts[host].pid, signal.SIGKILL)
            wait(cluster, host)

        monkeypatch.setattr(LocalCluster, "_wait_ready", wait_ready)


def test_an_agent_killed_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assassin = Assassin(monkeypatch, 2)
    result = Trainer(lambda: 7, run_config=RunConfig(storage_path=str(tmp_path))).fit()
    assert result.return_value == 7
    assert not assassin.left


def test_agents_that_never_start_spend_the_budget_for_starts_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assassin = Assassin(monkeypatch, 100)
    with pytest.raises(ControllerError, match=r"the agent of slice-0-host did not start"):
        Trainer(
            lambda: 7,
            run_config=RunConfig(
                storage_path=str(tmp_path), failure_config=FailureConfig(controller_failure_limit=1)
            ),
        ).fit()
    assert assassin.left == 98
    assert not ours()
