"""A run in numbers that only grow, from its journal, and as Prometheus scrapes them."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from everstep import ConfigError, RunConfig
from everstep.control import commands as c
from everstep.control.budgets import Budget
from everstep.control.table import Phase
from everstep.errors import StorageError
from everstep.failures import Failure, Kind
from everstep.goodput import Category, Ledger
from everstep.journal import journal, records
from everstep.journal.counters import RunCounters
from everstep.journal.journal import Journal
from everstep.observe.metrics_server import MetricsServer, metrics_server
from everstep.observe.prometheus import METRICS, STATES, Metric, MetricsSource
from everstep.storage.asynchronous import AsyncStore, ImmediateStore, complete
from everstep.storage.store import open_store
from scraped import free_port, scrape

OWNER = records.Owner("host", "boot", 1, 1)
CRASH = Failure(Kind.SIGNAL, 0.0, "killed", rank=1)


def opened(at: float = 0.0) -> records.Opened:
    return records.Opened(records.FORMAT, 1, OWNER, at, at, "0", "run", 2, 2, "", "", "nonce")


def rows(first: int, count: int, epoch: int = 1) -> records.Metrics:
    return records.Metrics(epoch, first, [b"\x80"] * count)  # type: ignore[list-item]


def committed(folder: str) -> records.Committed:
    return records.Committed(1.0, folder, 1, 1, b"\x80", None)  # type: ignore[arg-type]


def decided(cause: Failure = CRASH) -> c.RecoveryDecided:
    return c.RecoveryDecided(1.0, cause, Budget.FAILURES, 1, 3, (), 0.0)


def recovered(lost: int) -> c.Recovered:
    return c.Recovered(
        9.0, 2, c.Rung.RESTART_IN_PLACE, CRASH, "", lost, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0
    )


def source(*found: records.AnyRecord) -> MetricsSource:
    ledger = Ledger()
    ledger.charge(Category.STEP, 2, 0.0, 9.0)
    ledger.charge(Category.WAITING, 2, 9.0, 10.0)
    workers = {"training": 1, "starting": 1, "unplaced": 0}
    return MetricsSource("a run", "id", RunCounters.of(found), lambda: ledger, lambda: workers)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with metrics_server(RunConfig(metrics_port=0)) as server:
        assert server is not None
        yield server


# ---------------------------------------------------------------------- counting


def test_what_happens_is_counted() -> None:
    figures = RunCounters.of(
        [
            opened(),
            c.PhaseChanged(1.0, "placing", 0),
            c.PhaseChanged(3.0, "starting", 1),
            c.PhaseChanged(6.0, "running", 1),
            rows(1, 10),
            committed("a"),
            c.PhaseChanged(20.0, "stopping", 1),
            decided(),
            c.PhaseChanged(21.5, "starting", 2),
            c.PhaseChanged(22.5, "running", 2),
            recovered(4),
            rows(1, 6, epoch=2),
            committed("b"),
            committed("a"),  # adopted again, from its manifest
            records.Deleted(30.0, "a"),
        ]
    )
    assert (figures.reports, figures.steps_redone, figures.checkpoints) == (16, 4, 2)
    assert (figures.attempts, figures.drivers) == (2, 1)
    assert figures.restarts == {Kind.SIGNAL: 1}
    assert (figures.start_s, figures.stop_s) == (6.0, 1.5)
    assert figures.recovery_s["first_step"] == 8.0


def test_a_first_step_that_nothing_reported_is_not_counted() -> None:
    unreported = records.RecoveredWithoutReport(**msgspec.structs.asdict(recovered(0)))
    figures = RunCounters.of([opened(), unreported])
    assert (figures.recovery_s["stop"], figures.recovery_s["first_step"]) == (2.0, 0.0)


def test_the_time_of_a_driver_that_died_is_not_measured_by_the_next_ones_clock() -> None:
    figures = RunCounters.of([opened(), c.PhaseChanged(1.0, "starting", 1)])
    for record in (
        opened(5000.0),
        c.PhaseChanged(5001.0, "starting", 2),
        c.PhaseChanged(5003.0, "running", 2),
    ):
        figures.apply(record)
    assert figures.start_s == 2.0
    assert figures.drivers == 2


def test_a_run_that_is_taken_over_is_running_at_once() -> None:
    assert RunCounters.of([opened(), records.TakenOver(1.0, 1)]).phase == "running"


class Refusing(ImmediateStore):
    """A store that refuses to write while it is told to."""

    refuses = False

    async def create(self, path: str, data: bytes) -> bool:
        if self.refuses:
            raise StorageError("away")
        return await super().create(path, data)


def test_only_what_is_durable_is_counted(tmp_path: Path) -> None:
    store = Refusing(open_store(str(tmp_path)))
    figures = RunCounters()
    log = Journal(store, 1, 1, [], durable=figures.apply)
    log.append(rows(1, 3))
    assert figures.reports == 0
    store.refuses = True
    with pytest.raises(StorageError):
        complete(log.flush())
    log.append(rows(4, 2))
    assert figures.reports == 0
    store.refuses = False
    complete(log.flush())
    assert figures.reports == 5
    assert RunCounters.of(_written(store)).reports == 5


def test_a_new_beginning_of_a_journal_counts_what_had_not_been_written(tmp_path: Path) -> None:
    store = Refusing(open_store(str(tmp_path)))
    figures = RunCounters()
    log = Journal(store, 1, 1, [], durable=figures.apply)
    store.refuses = True
    log.append(rows(1, 3))
    with pytest.raises(StorageError):
        complete(log.flush())
    log.append(rows(4, 2))
    store.refuses = False
    complete(log.start_anew([opened(), rows(1, 3), rows(4, 2)]))
    complete(log.flush())
    assert figures.reports == RunCounters.of(_written(store)).reports == 5


def _written(store: AsyncStore) -> list[records.AnyRecord]:
    return [*complete(journal.scan_journal(store)).records()]


# ---------------------------------------------------------------------- names


def test_every_phase_is_a_state() -> None:
    assert {*STATES} == {*Phase}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_named_as_prometheus_asks(metric: Metric) -> None:
    assert metric.name.startswith(("everstep_", "ray_train_"))
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".")


def test_metrics_of_ray_train_have_its_names_and_labels() -> None:
    pytest.importorskip("ray.train")
    from ray.train.v2._internal.execution.controller.state import TrainControllerStateType
    from ray.train.v2._internal.metrics.base import RUN_ID_TAG_KEY, RUN_NAME_TAG_KEY
    from ray.train.v2._internal.metrics.controller import ControllerMetrics

    names = {name for key, name in vars(ControllerMetrics).items() if key.isupper() and "TAG" not in key}
    ours = {metric.name: metric for metric in METRICS if metric.is_rays}
    assert {*ours} == {f"ray_{name}" for name in names}
    assert all(metric.labels[:2] == (RUN_NAME_TAG_KEY, RUN_ID_TAG_KEY) for metric in ours.values())
    assert ours["ray_train_controller_state"].label == ControllerMetrics.CONTROLLER_STATE_TAG_KEY
    assert {*STATES.values()} <= {state.name for state in TrainControllerStateType}


# ---------------------------------------------------------------------- serving


def test_what_is_scraped_can_be_parsed_and_is_what_was_counted(server: MetricsServer) -> None:
    server.serve(source(opened(), rows(1, 10), decided(), recovered(4), c.PhaseChanged(9.0, "running", 2)))
    found = scrape(server.url)
    assert {name for name, _ in found} == {metric.name for metric in METRICS}
    run = {"run": "a run", "run_id": "id"}
    assert found["everstep_reports_total", run] == 10
    assert found["everstep_steps_redone_total", run] == 4
    assert found["everstep_restarts_total", {**run, "cause": "signal"}] == 1
    assert found["everstep_ledger_seconds", {**run, "category": "waiting for capacity"}] == 2
    assert found["everstep_goodput_ratio", run] == 0.9
    assert found["everstep_workers", {**run, "state": "starting"}] == 1
    rays = {"ray_train_run_name": "a run", "ray_train_run_id": "id"}
    assert found["ray_train_controller_state", {**rays, "ray_train_controller_state": "RUNNING"}] == 1
    assert found["ray_train_controller_state", {**rays, "ray_train_controller_state": "RESTARTING"}] == 0


def test_a_strange_name_of_a_run_stays_one_label(server: MetricsServer) -> None:
    name = 'a "run"\\ named\tso, {x="1"} 2'
    server.serve(MetricsSource(name, "id", RunCounters(), Ledger, dict))
    assert scrape(server.url)["everstep_reports_total", {"run": name, "run_id": "id"}] == 0


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("GET", "/metricsx", 404), ("POST", "/metrics", 501)]
)
def test_nothing_else_is_answered(server: MetricsServer, method: str, path: str, status: int) -> None:
    server.serve(source(opened()))
    asked = urlsplit(server.url)
    connection = http.client.HTTPConnection(asked.hostname or "", asked.port)
    connection.request(method, path)
    assert connection.getresponse().status == status
    connection.close()
    assert scrape(server.url)


def test_it_is_reached_on_loopback_only_unless_told_otherwise(server: MetricsServer) -> None:
    assert urlsplit(server.url).hostname == "127.0.0.1"
    with metrics_server(RunConfig(metrics_port=0, metrics_host="::1")) as other:
        assert other is not None
        other.serve(source(opened()))
        assert other.url.startswith("http://[::1]:")
        assert scrape(other.url)


def test_a_client_that_says_nothing_does_not_keep_the_run_from_ending() -> None:
    with metrics_server(RunConfig(metrics_port=0)) as server:
        assert server is not None
        server.serve(source(opened()))
        asked = urlsplit(server.url)
        silent = socket.create_connection((asked.hostname, asked.port))
    assert not [thread for thread in threading.enumerate() if thread.name == "everstep-metrics"]
    silent.close()


def test_the_port_can_be_had_again_at_once() -> None:
    config = RunConfig(metrics_port=free_port())
    for _ in range(2):
        with metrics_server(config) as server:
            assert server is not None
            server.serve(source(opened()))
            assert scrape(server.url)


def test_a_port_that_is_in_use_is_told_with_the_field_and_a_remedy(server: MetricsServer) -> None:
    port = urlsplit(server.url).port
    told = rf"RunConfig\.metrics_port is {port}.*in use.*0 for any"
    with pytest.raises(ConfigError, match=told) as raised, metrics_server(RunConfig(metrics_port=port)):
        pass
    assert raised.value.field == "RunConfig.metrics_port"


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    config = RunConfig(metrics_port=0, metrics_host="192.0.2.1")
    with (
        pytest.raises(ConfigError, match=r"metrics_host is '192\.0\.2\.1'.*0\.0\.0\.0"),
        metrics_server(config),
    ):
        pass


def test_without_a_port_nothing_is_served() -> None:
    with metrics_server(RunConfig()) as server:
        assert server is None


# ---------------------------------------------------------------------- the environment


def test_the_environment_overrides_the_port_and_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "EVERSTEP_METRICS_PORT", "9401")
    monkeypatch.setitem(os.environ, "EVERSTEP_METRICS_HOST", "0.0.0.0")
    config = RunConfig(metrics_port=9400)
    assert (config.metrics_port, config.metrics_host) == (9401, "0.0.0.0")
    assert RunConfig().metrics_port == 9401


@pytest.mark.parametrize("text", ["", "no", "-1", "65536", "9400 ", "٣"])
def test_a_port_of_the_environment_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setitem(os.environ, "EVERSTEP_METRICS_PORT", text)
    with pytest.raises(ConfigError, match=r"EVERSTEP_METRICS_PORT is .*expected a port, 0 to 65535"):
        RunConfig()
