"""What the operator counts, for Prometheus, and whether it lives."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from enum import Enum
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from everstep.kube.store import Key

_HEALING_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
_GROUP = ("namespace", "cluster", "group")

logger = logging.getLogger("everstep.kube")


class Readiness(Enum):
    """What an operator says of itself."""

    STARTING = "starting: it hasn't seen everything yet"
    WORKING = "ok"
    STANDING_BY = "standing by"
    CUT_OFF = "it has no lease, and can't see who has"


class OperatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of = self.registry
        self._ready = Gauge("everstep_operator_slices_ready", "Replicas that are whole.", _GROUP, registry=of)
        self._desired = Gauge("everstep_operator_slices_desired", "Replicas wanted.", _GROUP, registry=of)
        self._replaced = Counter(
            "everstep_operator_slices_replaced", "Replicas that were broken.", _GROUP, registry=of
        )
        self._healing = Histogram(
            "everstep_operator_heal_seconds",
            "From the first replica that a group lacks to all being whole again.",
            _GROUP,
            buckets=_HEALING_S,
            registry=of,
        )
        self._calls = Counter(
            "everstep_operator_api_calls", "Requests to the API server.", ("method", "code"), registry=of
        )
        self._leads = Gauge(
            "everstep_operator_leads", "Whether it may write in the namespace.", ("namespace",), registry=of
        )
        self._lacking: dict[tuple[str, ...], float] = {}
        self._whole: set[tuple[str, ...]] = set()

    def called(self, method: str, code: int) -> None:
        self._calls.labels(method, str(code)).inc()

    def leads(self, namespace: str, holds: bool) -> None:
        self._leads.labels(namespace or "*").set(holds)

    def replaced(self, key: Key, group: str) -> None:
        self._replaced.labels(*key, group).inc()

    def described(self, key: Key, status: Mapping[str, Any]) -> None:
        for group in status.get("groups") or ():
            labels = (*key, group["name"])
            self._ready.labels(*labels).set(group["ready"])
            self._desired.labels(*labels).set(group["desired"])
            self._heal(labels, group["ready"] >= group["desired"])

    def _heal(self, labels: tuple[str, ...], whole: bool) -> None:
        """A group that has never been whole isn't healing, but growing."""
        if whole:
            since = self._lacking.pop(labels, None)
            if since is not None:
                self._healing.labels(*labels).observe(time.monotonic() - since)
            self._whole.add(labels)
        elif labels in self._whole:
            self._lacking.setdefault(labels, time.monotonic())

    def forget(self, key: Key) -> None:
        """The cluster is gone."""
        for labels in [labels for labels in self._whole | set(self._lacking) if labels[:2] == key]:
            self._whole.discard(labels)
            self._lacking.pop(labels, None)
            for gauge in (self._ready, self._desired):
                with contextlib.suppress(KeyError):
                    gauge.remove(*labels)


class Measured(Protocol):
    """What the metrics need of an operator."""

    @property
    def metrics(self) -> OperatorMetrics: ...

    @property
    def ready(self) -> Readiness: ...


@contextlib.asynccontextmanager
async def served(operator: Measured, port: int, address: str = "0.0.0.0") -> AsyncIterator[None]:
    """``/metrics``; and for the kubelet ``/healthz``, which answers while the operator's loop turns, and
    ``/readyz``, which is well while this operator works, or stands by for the one that does.
    """

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(operator.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def ready(_: web.Request) -> web.Response:
        said = operator.ready
        well = said in (Readiness.WORKING, Readiness.STANDING_BY)
        return web.Response(status=200 if well else 503, text=said.value)

    app = web.Application()
    app.add_routes([web.get("/metrics", scrape), web.get("/healthz", healthy), web.get("/readyz", ready)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, port).start()
        logger.info("metrics on port %d", port)
        yield
    finally:
        await runner.cleanup()
