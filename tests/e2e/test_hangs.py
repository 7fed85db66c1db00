"""Workers stand still in every way that workers do: the right one is named, and training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from everstep import (
    Deadlines,
    FailureConfig,
    NCCLHangError,
    RunConfig,
    ScalingConfig,
    Trainer,
    WorkerGroupError,
)
from everstep.control.commands import HangSeen, Recovered
from everstep.failures import Kind
from everstep.jax import JaxTrainer
from everstep.journal import journal
from everstep.observe.registry import live_runs
from everstep.trainer import Trainer as AnyTrainer
from noted import notes
from processes import ours, wait_for

from . import hanging
from .training import BareTorch

QUICK = Deadlines(hang_s=3.0, hang_look_s=0.25, backoff_first_s=0.0, backoff_max_s=0.0)
QUICK_TO_SAVE = replace(QUICK, hang_restore_s=4.0, hang_checkpoint_s=4.0)
WORLD = 3
BARE_TORCH = partial(Trainer, backend_config=BareTorch())


def config(tmp_path: Path, failures: FailureConfig, limits: Deadlines = QUICK) -> RunConfig:
    return RunConfig(name="hangs", storage_path=str(tmp_path), failure_config=failures, deadlines=limits)


def hangs(tmp_path: Path) -> list[HangSeen]:
    return [r for r in journal.read(tmp_path / "hangs") if isinstance(r, HangSeen)]


def recoveries(tmp_path: Path) -> list[Recovered]:
    return [r for r in journal.read(tmp_path / "hangs") if isinstance(r, Recovered)]


def run(
    tmp_path: Path,
    function: Any,
    *,
    trainer: Callable[..., AnyTrainer] = Trainer,
    failures: FailureConfig | None = None,
    limits: Deadlines = QUICK,
    world: int = WORLD,
    ways: Sequence[str] = ("sleep",),
    **given: Any,
) -> None:
    trainer(
        function,
        train_loop_config={"steps": 30, "rank": 1, "at": 20, "ways": ways, **given},
        scaling_config=ScalingConfig(num_workers=world),
        run_config=config(tmp_path, failures or FailureConfig(max_failures=len(ways)), limits),
    ).fit()


@pytest.mark.parametrize("function", [hanging.plain, hanging.with_barriers])
def test_a_rank_that_hangs_is_named_with_its_line_and_training_goes_on(tmp_path: Path, function: Any) -> None:
    ways = ["sleep", "stop_itself", "keep_the_lock", "spin_in_c", "wait_for_a_child"]
    run(tmp_path, function, ways=ways)
    causes = [recovery.cause for recovery in recoveries(tmp_path)]
    assert [(cause.kind, cause.rank) for cause in causes if cause] == [(Kind.HANG, 1)] * len(ways)
    for way, hang in zip(ways, hangs(tmp_path), strict=True):
        assert hang.ranks == (1,), way
        page = (tmp_path / "hangs" / hang.stacks).read_text()
        assert page.startswith("=== rank 1 (the others wait for this)\n")
        assert "ranks 0, 2" in page or function is hanging.plain
        assert hanging.explained(way, at=20, steps=30) in hang.message
        assert ("stopped (SIGSTOP)" in hang.message) is (way == "stop_itself")
        assert ("kept Python's lock" in hang.message) is (way in ("keep_the_lock", "spin_in_c"))


def test_of_ranks_in_an_all_reduce_the_one_that_is_missing_is_named(tmp_path: Path) -> None:
    ways = ["sleep", "stop_itself", "keep_the_lock", "skip", "return", "leave"]
    run(tmp_path, hanging.with_torch, trainer=BARE_TORCH, ways=ways)
    for way, hang in zip(ways, hangs(tmp_path), strict=True):
        assert hang.ranks == (1,), way
        assert hanging.explained(way, at=20, steps=30) in hang.message


def test_with_jax_too(tmp_path: Path) -> None:
    run(tmp_path, hanging.with_jax, trainer=JaxTrainer, ways=["sleep", "return"])
    assert [hang.ranks for hang in hangs(tmp_path)] == [(1,), (1,)]
    for way, hang in zip(["sleep", "return"], hangs(tmp_path), strict=True):
        assert hanging.explained(way, at=20, steps=30) in hang.message


@pytest.mark.parametrize(
    ("function", "failures", "stage"),
    [(hanging.stalls_in_restore, 2, "restore"), (hanging.stalls_in_upload, 1, "checkpoint")],
)
def test_a_restore_and_an_upload_have_deadlines_of_their_own(
    tmp_path: Path, function: Any, failures: int, stage: str
) -> None:
    run(tmp_path, function, failures=FailureConfig(max_failures=failures), limits=QUICK_TO_SAVE)
    (hang,) = hangs(tmp_path)
    assert hang.ranks == (1,)
    assert f" in {stage}{hanging.explained('sleep', at=20, steps=30)}" in hang.message


def test_without_budget_the_run_ends_with_the_rank_its_line_and_its_stack(tmp_path: Path) -> None:
    with pytest.raises(NCCLHangError, match="rank 1 on .* made no progress for") as caught:
        run(tmp_path, hanging.with_barriers, failures=FailureConfig())
    assert caught.value.first_rank == 1
    assert "in sleep" in str(caught.value)
    assert "everstep/agent/" not in str(caught.value), "the stack begins with the user's function"


def test_on_hang_fail_ends_the_run_although_restarts_are_left(tmp_path: Path) -> None:
    with pytest.raises(NCCLHangError, match="on_hang='fail'"):
        run(tmp_path, hanging.plain, failures=FailureConfig(max_failures=-1, on_hang="fail"))
    assert [hang.action for hang in hangs(tmp_path)] == ["fail"]


@pytest.mark.parametrize(
    "function",
    [
        hanging.evaluates,
        hanging.compiles,
        hanging.idles,
        hanging.naps,
        hanging.polls,
        hanging.pauses,
        hanging.beats,
    ],
)
def test_what_only_looks_like_a_hang_is_left_alone(tmp_path: Path, function: Any) -> None:
    (tmp_path / "notes").mkdir()
    run(tmp_path, function, busy_s=8.0, idle_s=8.0, nap_s=2.0, notes=str(tmp_path / "notes"))
    assert not hangs(tmp_path)


def test_a_machine_that_was_suspended_is_not_a_hang(tmp_path: Path) -> None:
    limits = Deadlines(hang_s=3.0, hang_look_s=0.25, heartbeat_timeout_s=120.0)
    where, enough = tmp_path / "notes", tmp_path / "enough"
    where.mkdir()
    others = set(ours())
    running = Thread(
        target=run,
        args=(tmp_path, hanging.until_told),
        kwargs={"limits": limits, "notes": str(where), "enough": str(enough)},
    )
    running.start()
    wait_for(lambda: _steps(where) >= 3 * 30, "steps of every rank")
    asleep = set(ours()) - others
    for sig in (signal.SIGSTOP, signal.SIGCONT):
        for pid in asleep:
            os.kill(pid, sig)
        if sig == signal.SIGSTOP:
            time.sleep(8.0)  # this is how long it is suspended: more than twice what makes a hang
    before = _steps(where)
    wait_for(lambda: _steps(where) >= before + 3 * 100, "more steps of every rank")
    enough.touch()
    running.join()
    assert not hangs(tmp_path)


@pytest.mark.parametrize("size", [1, 2])
def test_a_replica_group_that_hangs_is_replaced_and_the_others_never_stop(tmp_path: Path, size: int) -> None:
    where, enough, hung = tmp_path / "notes", tmp_path / "enough", tmp_path / "hang"
    where.mkdir()
    trainer = Trainer(
        hanging.until_told_or_hung,
        train_loop_config={"notes": str(where), "enough": str(enough), "hangs": str(hung), "rank": size},
        scaling_config=ScalingConfig(num_workers=2 * size, replica_group_size=size),
        run_config=config(tmp_path, FailureConfig(max_failures=1)),
    )
    running = Thread(target=trainer.fit)
    running.start()
    wait_for(lambda: len(notes(where)) == 2 * size and _steps(where) >= 20 * size, "steps of every rank")
    before = _pids(where)
    hung.touch()
    wait_for(lambda: _pids(where)[size] != before[size], "a new process of the rank that hangs")
    enough.touch()
    running.join()
    (hang,) = hangs(tmp_path)
    assert hang.ranks == (size,)
    after = _pids(where)
    assert {rank for rank, pid in after.items() if pid == before[rank]} == set(range(size))


DRIVER = """
import sys
from everstep import Deadlines, FailureConfig, RunConfig, ScalingConfig, Trainer
from e2e import hanging

Trainer(
    hanging.until_told,
    train_loop_config={"notes": sys.argv[1] + "/notes", "enough": sys.argv[1] + "/enough"},
    scaling_config=ScalingConfig(num_workers=3),
    run_config=RunConfig(
        name="hangs",
        storage_path=sys.argv[1],
        failure_config=FailureConfig(max_failures=1),
        deadlines=Deadlines(hang_s=3.0, hang_look_s=0.25),
    ),
).fit()
"""


def test_a_driver_that_takes_over_sees_the_hangs_that_are_there_and_no_others(tmp_path: Path) -> None:
    where = tmp_path / "notes"
    where.mkdir()

    def drive() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)])

    def wait_for_steps(more: int) -> None:
        before = {rank: len(rows) for rank, rows in notes(where).items()}
        wait_for(
            lambda: (
                len(notes(where)) == WORLD
                and all(len(rows) >= before.get(rank, 0) + more for rank, rows in notes(where).items())
            ),
            "steps of every rank",
        )

    with drive() as first:
        wait_for_steps(20)
        first.kill()
    wait_for_steps(100)  # nobody drives: at a step's pace, for longer than makes a hang
    with drive() as second:
        wait_for(lambda: _driver() == second.pid, "the take-over")
        wait_for_steps(100)
        assert not hangs(tmp_path)
        second.kill()
    os.kill(_pids(where)[1], signal.SIGSTOP)
    with drive() as third:
        wait_for(lambda: hangs(tmp_path), "the hang")
        wait_for_steps(20)
        (tmp_path / "enough").touch()
    assert third.returncode == 0
    assert [hang.ranks for hang in hangs(tmp_path)] == [(1,)]


def _driver() -> int:
    live = live_runs().get("hangs")
    return live.driver_pid if live is not None else 0


def _pids(where: Path) -> dict[int, int]:
    return {rank: rows[-1]["pid"] for rank, rows in notes(where).items()}


def _steps(where: Path) -> int:
    return sum(len(rows) for rows in notes(where).values())


def test_a_slow_first_step_is_left_alone(tmp_path: Path) -> None:
    run(tmp_path, hanging.starts_slowly, idle_s=8.0)
    assert not hangs(tmp_path)


def test_a_segmentation_fault_leaves_pythons_stack_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match="SIGSEGV") as caught:
        run(tmp_path, hanging.crashes, failures=FailureConfig(), world=1)
    assert "in read_nowhere" in str(caught.value)
    assert "in crashes" in str(caught.value)
