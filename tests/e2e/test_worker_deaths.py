"""Workers die of everything that workers die of; training goes on, and what was committed is not lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep import (
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    WorkerGroupError,
)
from everstep.control.commands import GroupStarted, Recovered, RecoveryDecided
from everstep.failures import Kind
from everstep.jax import JaxTrainer
from everstep.journal import journal, records
from everstep.observe.registry import LiveWorker, live_runs
from everstep.testing import LocalCluster
from noted import notes
from processes import LIMIT_S, alive, wait_for

from .training import (
    PACE_S,
    BareTorch,
    elastic_steps,
    jax_steps,
    restore_step,
    save_step,
    steps_without_framework,
    torch_steps,
)


class Fit:
    """``fit()`` in a thread of its own, so that the test can break things meanwhile."""

    def __init__(self, make: Callable[[], Trainer]) -> None:
        self.result: Result | None = None
        self.error: BaseException | None = None
        trainer = make()

        def run() -> None:
            try:
                self.result = trainer.fit()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self) -> Result:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the run did not end"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def folder(tmp_path: Path, name: str) -> str:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    return str(path)


def kills(count: int) -> Any:
    """Few by default; ``make soak`` runs the whole hunt."""
    return pytest.param(count, marks=pytest.mark.soak)


def hunt(fit: Fit, tmp_path: Path, world: int, times: int, strike: Callable[[dict[int, int]], None]) -> None:
    """Strike ``times`` times in a row, each time after every rank has stepped again and at a random instant;
    then let the run end.
    """
    where = tmp_path / "notes"
    for n in range(times):
        epoch = n + 1

        def stepping(epoch: int = epoch) -> bool:
            assert fit.error is None, fit.error
            seen = notes(where)
            return len(seen) == world and all(
                any(row["epoch"] >= epoch and not row.get("restored") for row in rows)
                for rows in seen.values()
            )

        wait_for(stepping, f"a step of every rank in epoch {epoch}")
        now = notes(where)
        latest = max(row["epoch"] for rows in now.values() for row in rows)
        pids = {rank: rows[-1]["pid"] for rank, rows in now.items() if rows[-1]["epoch"] == latest}
        time.sleep(random.random() * 0.05)
        strike(pids)
        wait_for(
            lambda latest=latest: any(
                row["epoch"] > latest for rows in notes(where).values() for row in rows
            ),
            "the next epoch",
        )
        for pid in pids.values():
            wait_for(lambda pid=pid: not alive(pid), f"the end of the old worker {pid}")
    final = max(row["epoch"] for rows in notes(where).values() for row in rows)
    wait_for(
        lambda: all(
            any(row["epoch"] >= final and not row.get("restored") for row in rows)
            for rows in notes(where).values()
        ),
        "a step of every rank after the last strike",
    )
    (tmp_path / "until").touch()


def check_resumed_from_newest(tmp_path: Path, result: Result) -> None:
    """Every rank of an epoch starts at the newest checkpoint that was committed before it."""
    committed = 0
    starts: dict[int, set[int]] = {}
    for rows in notes(tmp_path / "notes").values():
        for row in rows:
            if row.get("restored"):
                starts.setdefault(row["epoch"], set()).add(row["step"])
    newest_before: dict[int, int] = {}
    for record in journal.read(Path(result.path)):
        if isinstance(record, records.Committed):
            import msgspec

            committed = msgspec.msgpack.decode(record.metrics)["step"]
        elif isinstance(record, GroupStarted):
            newest_before[record.epoch] = committed
    for epoch, steps in starts.items():
        if epoch in newest_before:
            assert steps == {newest_before[epoch]}, f"epoch {epoch} started from {steps}"


def config(tmp_path: Path, save_every: int = 5) -> dict[str, Any]:
    return {"notes": folder(tmp_path, "notes"), "until": str(tmp_path / "until"), "save_every": save_every}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [3, kills(100)])
@pytest.mark.parametrize("torch", [True, False], ids=["torch", "jax"])
def test_any_rank_killed_at_any_instant_leads_back_to_every_rank_stepping(
    tmp_path: Path, times: int, torch: bool
) -> None:
    times = times if torch else max(2, times // 4)
    trainer = partial(Trainer, backend_config=BareTorch()) if torch else JaxTrainer
    fit = Fit(
        lambda: trainer(
            torch_steps if torch else jax_steps,
            train_loop_config=config(tmp_path),
            scaling_config=ScalingConfig(num_workers=4),
            run_config=RunConfig(
                name="hunt", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=times)
            ),
        )
    )

    def strike(pids: dict[int, int]) -> None:
        rank = random.choice(sorted(pids))
        os.kill(pids[rank], signal.SIGKILL)

    hunt(fit, tmp_path, 4, times, strike)
    result = fit.done()
    check_resumed_from_newest(tmp_path, result)
    records = list(journal.read(Path(result.path)))
    decided = [r for r in records if isinstance(r, RecoveryDecided)]
    assert [r.spent for r in decided if r.budget == "max_failures"] == list(range(1, len(decided) + 1))
    assert all(r.cause.signal == "SIGKILL" for r in decided), [r.cause for r in decided]
    assert len(decided) == times
    recovered = [r for r in records if isinstance(r, Recovered)]
    print(f"\n{times} kills; recovery seconds: {sorted(round(r.total_s, 3) for r in recovered)}")


@pytest.mark.parametrize("times", [2, kills(20)])
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_host_is_replaced_by_a_spare_and_may_come_back(tmp_path: Path, how: str, times: int) -> None:
    with LocalCluster(slices=5, workers_per_host=1) as cluster:
        fit = Fit(
            lambda: Trainer(
                elastic_steps,
                train_loop_config={**config(tmp_path), "pause_s": PACE_S},
                scaling_config=ScalingConfig(num_workers=4),
                run_config=RunConfig(
                    name="hosts", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=-1)
                ),
                engine=cluster,
            )
        )

        def seen() -> int:
            records = journal.read(tmp_path / "hosts")
            return sum(isinstance(record, RecoveryDecided) for record in records)

        def strike(pids: dict[int, int]) -> None:
            def workers() -> dict[int, LiveWorker]:
                return {worker.rank: worker for worker in live_runs()["hosts"].workers}

            wait_for(lambda: {r: w.pid for r, w in workers().items()} == pids, "those that step, on record")
            host = random.choice(sorted({worker.host for worker in workers().values()}))
            if how == "killed":
                cluster.kill_host(host)
                cluster.add_slice(wait=False)
            else:
                before = seen()
                cluster.freeze_host(host)
                # Not after some seconds: a driver that is short of CPU takes its time to call a host silent.
                wait_for(lambda: seen() > before, "that it is missed")
                cluster.thaw_host(host)

        hunt(fit, tmp_path, 4, times, strike)
        result = fit.done()
        check_resumed_from_newest(tmp_path, result)
        kinds = {r.cause.kind for r in journal.read(Path(result.path)) if isinstance(r, RecoveryDecided)}
        assert kinds == {Kind.HOST_LOST if how == "killed" else Kind.HOST_SILENT}


def test_a_death_with_no_budget_left_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    def dies(config: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(WorkerGroupError, match="SIGSEGV") as caught:
        Trainer(
            dies,
            run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=0)),
        ).fit()
    assert caught.value.first_cause is not None
    assert caught.value.first_cause.signal == signal.SIGSEGV


def test_the_error_names_the_rank_that_failed_first_not_its_peers(tmp_path: Path) -> None:
    def fails(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        import everstep

        for step in range(100):
            if everstep.get_context().get_world_rank() == 2 and step == 10:
                print("about to fail")
                raise ZeroDivisionError("the reason")
            dist.all_reduce(torch.ones(8))

    with pytest.raises(WorkerGroupError) as caught:
        Trainer(
            fails,
            backend_config=BareTorch(),
            scaling_config=ScalingConfig(num_workers=4),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
    first_line = str(caught.value).splitlines()[0]
    assert "rank 2" in first_line
    assert "ZeroDivisionError: the reason" in first_line
    assert 'raise ZeroDivisionError("the reason")' in str(caught.value)
    assert "about to fail" in "\n".join(caught.value.first_cause.log_tail)


class SaysNothing(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SaysNothing(), "raised SaysNothing: its message can't be shown"),
        (FileNotFoundError(os.fsdecode(b"\xff.csv")), r"raised FileNotFoundError: \udcff.csv"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_is_named_whatever_its_message_is(
    tmp_path: Path, error: Exception, told: str, workers: int
) -> None:
    def function() -> None:
        raise error

    trainer = Trainer(
        function,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(TrainingFailedError) as caught:
        trainer.fit()
    assert told in str(caught.value).splitlines()[0]


def test_an_exit_code_is_a_failure_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match="exited with code 7"):
        Trainer(lambda: os._exit(7), run_config=RunConfig(storage_path=str(tmp_path))).fit()


def test_a_restart_gives_every_rank_the_newest_checkpoint(tmp_path: Path) -> None:
    def fails_once(config: dict[str, Any]) -> int:
        import everstep
        from e2e.training import steps_without_framework

        if everstep.get_context().get_attempt() == 1:
            steps_without_framework({**config, "steps": 7})
            everstep.collective.barrier()
            raise RuntimeError("once")
        return steps_without_framework(config)

    result = Trainer(
        fails_once,
        train_loop_config={"notes": folder(tmp_path, "notes"), "steps": 12},
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.return_value == 7
    assert [row["step"] for row in result.metrics_history] == list(range(1, 13))
    assert result.checkpoint is not None
    assert (Path(result.checkpoint.path) / "step").read_text() == "12"


def test_a_second_fit_with_the_same_name_resumes(tmp_path: Path) -> None:
    def run(steps: int, fail: bool) -> Result:
        def function(config: dict[str, Any]) -> int:
            import everstep
            from e2e.training import steps_without_framework

            start = steps_without_framework(config)
            everstep.collective.barrier()
            if config["fail"]:
                raise RuntimeError("interrupted")
            return start

        return Trainer(
            function,
            train_loop_config={"notes": folder(tmp_path, "notes"), "steps": steps, "fail": fail},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="again", storage_path=str(tmp_path)),
        ).fit()

    with pytest.raises(WorkerGroupError):
        run(4, True)
    result = run(9, False)
    assert result.return_value == 4
    assert [row["step"] for row in result.metrics_history] == list(range(1, 10))
    again = Result.from_path(result.path)
    assert again.metrics_history == result.metrics_history
    assert again.checkpoint == result.checkpoint
    assert steps_without_framework is not None


@pytest.mark.parametrize("max_failures", [0, 1])
def test_a_rank_that_raises_after_a_report_does_not_cost_the_save_of_that_report(
    tmp_path: Path, max_failures: int
) -> None:
    def function() -> int:
        step = restore_step()
        rank = everstep.get_context().get_world_rank()
        if step > 0:
            return step
        for step in range(1, 4):
            everstep.report({"step": step}, save_step(step) if rank == 0 else None)
        if rank == 1:
            raise RuntimeError("as asked, just after report 3")
        threading.Event().wait()
        return 0

    trainer = Trainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="raises",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    if max_failures:
        assert trainer.fit().return_value == 3
        return
    with pytest.raises(WorkerGroupError, match="as asked"):
        trainer.fit()
    checkpoint = Result.from_path(tmp_path / "raises").checkpoint
    assert checkpoint is not None
    assert (Path(checkpoint.path) / "step").read_text() == "3"
