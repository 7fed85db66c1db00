"""``RunConfig(metrics_port=…)``: a run as Prometheus sees it, through restarts and a driver's death."""

from __future__ import annotations

import socket
import urllib.error
from pathlib import Path

import pytest
from click.testing import CliRunner

from everstep import RunConfig, ScalingConfig, Trainer, report
from everstep.cli.runs import show
from processes import LIMIT_S, wait_for
from scraped import Samples, free_port, scrape

from .watched import DEATHS, WORKERS, await_step, kill, result, start

COUNTERS = (
    "everstep_reports_total",
    "everstep_steps_redone_total",
    "everstep_checkpoints_committed_total",
    "everstep_restarts_total",
    "everstep_recovery_seconds_total",
    "everstep_attempts_total",
    "everstep_drivers_total",
)


def answers(url: str) -> bool:
    try:
        return bool(scrape(url))
    except (urllib.error.URLError, ConnectionError):
        return False


def labels(found: Samples) -> dict[str, str]:
    return next(labels for name, labels in found if name == "everstep_reports_total")


def shown(folder: Path) -> str:
    done = CliRunner().invoke(show, [str(folder / "runs" / "watched")])
    assert done.exit_code == 0, done.output
    return done.output


def test_counters_go_on_through_restarts_and_a_driver_that_is_killed(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}/metrics"
    process = start(tmp_path, f"metrics_port={port}")
    await_step(tmp_path, max(DEATHS.values()) + 5, process)
    # The last recovery is told once every rank has reported again.
    wait_for(lambda: scrape(url).total("everstep_steps_redone_total") >= 4 + 7, "both recoveries")
    before = scrape(url)
    run = labels(before)
    assert run["run"] == "watched"
    assert before["everstep_restarts_total", {**run, "cause": "signal"}] == len(DEATHS)
    assert before["everstep_attempts_total", run] == 1 + len(DEATHS)
    assert before["everstep_drivers_total", run] == 1
    assert before["everstep_workers", {**run, "state": "training"}] == WORKERS
    assert before["everstep_ledger_seconds", {**run, "category": "redo"}] > 0
    assert 0 < before["everstep_goodput_ratio", run] < 1
    assert before.total("ray_train_controller_state") == 1
    assert before.total("ray_train_worker_group_start_total_time_s") > 0
    assert f"prometheus    {url} of process {process.pid}" in shown(tmp_path)
    before = scrape(url)
    kill(process)
    assert not answers(url)

    process = start(tmp_path, f"metrics_port={port}")
    wait_for(lambda: answers(url), "the next driver")
    after = scrape(url)
    assert labels(after) == run, "it is the same run"
    for name in COUNTERS:
        assert after.total(name) >= before.total(name), name
    assert after["everstep_drivers_total", run] == 2
    wait_for(
        lambda: scrape(url)["everstep_reports_total", run] > before["everstep_reports_total", run], "steps"
    )
    assert scrape(url)["everstep_attempts_total", run] == 1 + len(DEATHS), "its workers never stopped"
    (tmp_path / "until").touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert f"metrics for Prometheus: {url}" in output
    assert not answers(url)
    assert "prometheus" not in shown(tmp_path)
    assert len(result(tmp_path).metrics_history) >= after.total("everstep_reports_total")


def test_a_port_in_use_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = RunConfig(name="run", storage_path=str(tmp_path / "runs"), metrics_port=port)
        with pytest.raises(ValueError, match=rf"RunConfig\.metrics_port is {port}"):
            Trainer(print, run_config=config).fit()
    assert not (tmp_path / "runs").exists()


def test_a_function_in_this_process_is_seen_too(tmp_path: Path) -> None:
    port = free_port()
    seen = []

    def train() -> None:
        report({"loss": 1.0})
        seen.append(scrape(f"http://127.0.0.1:{port}/metrics"))

    config = RunConfig(name="run", storage_path=str(tmp_path), metrics_port=port)
    Trainer(train, scaling_config=ScalingConfig(num_workers=0), run_config=config).fit()
    run = labels(seen[0])
    assert seen[0]["everstep_workers", {**run, "state": "training"}] == 1
    assert seen[0]["everstep_attempts_total", run] == 1
