"""What a name that was used before does, by how its run ended; and two drivers that want one run."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep import (
    ConfigError,
    FailureConfig,
    Result,
    RunConfig,
    Trainer,
    TrainingFailedError,
    report,
)
from everstep.control.commands import GroupStarted, RecoveryDecided
from everstep.journal import journal, records
from processes import LIMIT_S, alive, wait_for

from .test_take_over import rows, start, stepped


def counts(config: dict[str, Any]) -> int:
    from e2e.training import restore_step, save_step

    begin = restore_step()
    for step in range(begin + 1, begin + 4):
        report({"step": step}, checkpoint=save_step(step))
    if config.get("fail"):
        raise RuntimeError("as asked")
    return begin


def fit(tmp_path: Path, name: str = "run", config: dict[str, Any] | None = None, **run: Any) -> Result:
    return Trainer(
        counts,
        train_loop_config=config or {},
        run_config=RunConfig(name=name, storage_path=str(tmp_path), **run),
    ).fit()


def test_a_failed_run_resumes_with_fresh_budgets(tmp_path: Path) -> None:
    for n in range(2):
        with pytest.raises(TrainingFailedError):
            fit(tmp_path, config={"fail": True}, failure_config=FailureConfig(max_failures=1))
        spent = [r.spent for r in journal.read(tmp_path / "run") if isinstance(r, RecoveryDecided)]
        assert spent == [1] * (n + 1)
    assert fit(tmp_path).return_value == 12


def test_a_finished_run_gives_its_result_and_a_changed_config_is_asked_about(tmp_path: Path) -> None:
    assert fit(tmp_path).return_value == 0
    assert fit(tmp_path).return_value == 0
    with pytest.raises(ConfigError, match="if_finished='continue'"):
        fit(tmp_path, config={"other": 1})
    assert fit(tmp_path, config={"other": 1}, if_finished="return").return_value == 0
    assert fit(tmp_path, config={"other": 1}, if_finished="continue").return_value == 3


def test_a_frozen_driver_that_was_taken_over_changes_nothing_when_it_wakes(tmp_path: Path) -> None:
    name = f"frozen-{random.getrandbits(32):08x}"
    first = start(tmp_path, name, lease_ttl_s=1.0)
    run = tmp_path / "runs" / name
    wait_for(lambda: any(isinstance(r, GroupStarted) for r in journal.read(run)), "a start on record")
    wait_for(lambda: stepped(tmp_path, 5), "steps")
    pids = {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items()}
    first.send_signal(signal.SIGSTOP)
    second = start(tmp_path, name, lease_ttl_s=1.0)
    wait_for(lambda: any(isinstance(r, records.TakenOver) for r in journal.read(run)), "the take-over")
    first.send_signal(signal.SIGCONT)
    output, _ = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 1
    assert f"process {second.pid}" in output
    before = max(r[-1]["step"] for r in rows(tmp_path).values())
    wait_for(lambda: stepped(tmp_path, before + 5), "steps under the new driver")
    assert all(alive(pid) for pid in pids.values())
    (tmp_path / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    assert sum(isinstance(r, GroupStarted) for r in journal.read(run)) == 1


def test_a_second_driver_of_a_live_run_gives_up_and_names_the_holder(tmp_path: Path) -> None:
    name = f"two-{random.getrandbits(32):08x}"
    first = start(tmp_path, name)
    wait_for(lambda: stepped(tmp_path, 3), "steps")
    second = start(tmp_path, name)
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 1
    assert f"driven by process {first.pid}" in output
    (tmp_path / "until").touch()
    output, _ = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0, output


def test_changed_code_is_not_mixed_with_the_old(tmp_path: Path) -> None:
    name = f"edited-{random.getrandbits(32):08x}"
    first = start(tmp_path, name)
    wait_for(lambda: stepped(tmp_path, 5), "steps")
    pids = {rank: r[-1]["pid"] for rank, r in rows(tmp_path).items()}
    first.kill()
    first.communicate()
    alone = max(r[-1]["step"] for r in rows(tmp_path).values())
    wait_for(lambda: stepped(tmp_path, alone + 5), "steps without a driver")
    second = start(tmp_path, name, save_every=2)
    wait_for(lambda: any(row["epoch"] == 2 for r in rows(tmp_path).values() for row in r), "the new epoch")
    assert not any(alive(pid) for pid in pids.values())
    (tmp_path / "until").touch()
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    assert "changed since this run was last started: train_loop_config" in output
    assert "took over 4 workers" in output
    for r in rows(tmp_path).values():
        # What they saved while nobody drove is where the new code goes on.
        resumed = next(row["step"] for row in r if row["epoch"] == 2)
        assert resumed % 3 == 0
        assert resumed > alone
