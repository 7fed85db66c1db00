"""A run's metrics, as Prometheus scrapes them: which there are, what they are called, and where each is from.

Those that Ray Train has too, with the same meaning, have its names and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from everstep.control.table import Phase
from everstep.goodput import Ledger
from everstep.journal.counters import RunCounters

_P = Phase
STATES = {
    _P.NEW: "INITIALIZING",
    _P.PLACING: "SCHEDULING",
    _P.WAITING: "SCHEDULING",
    _P.STARTING: "SCHEDULING",
    _P.RUNNING: "RUNNING",
    _P.SETTLING: "RESTARTING",
    _P.STOPPING: "RESTARTING",
    _P.BACKOFF: "RESTARTING",
    _P.ENDING: "SHUTTING_DOWN",
    _P.ENDED: "SHUTTING_DOWN",
}
"""The states of Ray Train's controller that the phases of a run are."""


@dataclass(frozen=True)
class MetricsSource:
    """What metrics are read from, in the process that drives a run."""

    name: str
    run_id: str
    figures: RunCounters
    ledger: Callable[[], Ledger]
    """Up to now."""
    workers: Callable[[], Mapping[str, int]]
    """How many are in which state."""


Values = Iterable[tuple[str, float]]
"""Each with the value of the metric's own label, or an empty one."""


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge"]
    label: str
    """Besides those that name the run; may be empty."""
    help: str
    values: Callable[[MetricsSource], Values]

    @property
    def is_rays(self) -> bool:
        return self.name.startswith("ray_train_")

    @property
    def labels(self) -> tuple[str, ...]:
        of_run = ("ray_train_run_name", "ray_train_run_id") if self.is_rays else ("run", "run_id")
        return (*of_run, self.label) if self.label else of_run


def _one(value: Callable[[MetricsSource], float]) -> Callable[[MetricsSource], Values]:
    return lambda source: [("", value(source))]


def _states(source: MetricsSource) -> Values:
    now = STATES[Phase(source.figures.phase)]
    return [(state, float(state == now)) for state in dict.fromkeys(STATES.values())]


METRICS = (
    Metric(
        "everstep_goodput_ratio",
        "gauge",
        "",
        "Share of the run's time spent in steps that were not done again.",
        _one(lambda source: source.ledger().goodput),
    ),
    Metric(
        "everstep_ledger_seconds",
        "gauge",
        "category",
        "Where the time of the wanted workers went, in seconds times workers.",
        lambda source: [(category.value, s) for category, s in source.ledger().total.items()],
    ),
    Metric(
        "everstep_workers",
        "gauge",
        "state",
        "Wanted workers that train, that are being started or restarted, and that have no place.",
        lambda source: [(state, float(count)) for state, count in source.workers().items()],
    ),
    Metric(
        "everstep_reports_total",
        "counter",
        "",
        "Steps that were reported, those that were done again included.",
        _one(lambda source: source.figures.reports),
    ),
    Metric(
        "everstep_steps_redone_total",
        "counter",
        "",
        "Steps that restarts went back before.",
        _one(lambda source: source.figures.steps_redone),
    ),
    Metric(
        "everstep_checkpoints_committed_total",
        "counter",
        "",
        "Checkpoints that were committed.",
        _one(lambda source: source.figures.checkpoints),
    ),
    Metric(
        "everstep_restarts_total",
        "counter",
        "cause",
        "Recoveries of all workers or of replica groups, by what failed first.",
        lambda source: [(kind.value, float(n)) for kind, n in dict(source.figures.restarts).items()],
    ),
    Metric(
        "everstep_recovery_seconds_total",
        "counter",
        "phase",
        "How long recoveries took, by their phases.",
        lambda source: [*dict(source.figures.recovery_s).items()],
    ),
    Metric(
        "everstep_attempts_total",
        "counter",
        "",
        "Starts of all workers, the first included.",
        _one(lambda source: source.figures.attempts),
    ),
    Metric(
        "everstep_drivers_total",
        "counter",
        "",
        "Drivers that have had the run: one more with every resume and take-over.",
        _one(lambda source: source.figures.drivers),
    ),
    Metric(
        "ray_train_controller_state",
        "gauge",
        "ray_train_controller_state",
        "1 for the state that the run is in, 0 for the others.",
        _states,
    ),
    Metric(
        "ray_train_worker_group_start_total_time_s",
        "gauge",
        "",
        "Seconds spent starting worker groups, from placing them until every worker is ready.",
        _one(lambda source: source.figures.start_s),
    ),
    Metric(
        "ray_train_worker_group_shutdown_total_time_s",
        "gauge",
        "",
        "Seconds spent ending worker groups.",
        _one(lambda source: source.figures.stop_s),
    ),
)


class RunCollector:
    """What a registry of ``prometheus_client`` collects."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for metric in METRICS:
            family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
            for label, value in metric.values(self._source):
                own = (label,) if metric.label else ()
                family.add_metric((self._source.name, self._source.run_id, *own), value)
            yield family


def table() -> str:
    """The metrics as a table of the documentation."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {f'`{metric.label}`' if metric.label else ''} | {metric.help} |"
        for metric in METRICS
    ]
    return "\n".join(["| metric | type | label | |", "| --- | --- | --- | --- |", *rows]) + "\n"
