"""Hears of changes, and gives each cluster that is ours a task of its own (``tending``), so that none waits
for another. Holds the leases: in each namespace one operator writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from everstep.kube import names
from everstep.kube.api import Api, clusters_path, core_path
from everstep.kube.informer import Informer
from everstep.kube.lease import Lease, LeaseGone, LeaseLost
from everstep.kube.store import Key, Store
from everstep.kube.tending import Tending

_AT_ONCE = 16
_EVERYWHERE = ""
"""In the place of a namespace: all of them."""

logger = logging.getLogger("everstep.kube")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    namespaces: tuple[str, ...] = ()
    """Those that are watched; none means all."""
    all_clusters: bool = False
    """Also those that don't carry the annotation."""
    lease_namespace: str = "default"
    """Where operators that watch all namespaces have the lease that makes one of them the one."""
    lease_s: float = 15.0


def is_claimed(raw: Mapping[str, Any], all_clusters: bool) -> bool:
    """Whether a cluster is this operator's to run."""
    managed_by = (raw.get("spec") or {}).get("managedBy")
    if managed_by not in (None, names.MANAGED_BY_US):
        return False
    annotations = raw["metadata"].get("annotations") or {}
    return all_clusters or annotations.get(names.MANAGED) == "true"


class Operator:
    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        self._settings = settings
        self._store = Store()
        self._leases: dict[str, Lease] = {}
        self._gates: dict[str, asyncio.Lock] = {}
        self._tending: dict[Key, Tending] = {}
        self._synced = False
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def run(self, on_ready: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until it is cancelled, or can't be the operator any more."""
        settings = self._settings
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if not settings.namespaces:
                    await self._acquire(_EVERYWHERE, settings.lease_namespace, f"{names.OPERATOR}-everywhere")
                # Always in the same order: two operators with the same namespaces don't wait for each other.
                for namespace in sorted(settings.namespaces):
                    await self.hold(namespace)
                informers = [
                    i for namespace in settings.namespaces or (None,) for i in self._informers(namespace)
                ]
                for informer in informers:
                    tasks.create_task(informer.run())
                for informer in informers:
                    await informer.synced.wait()
                # Not before everything was seen once: what isn't known yet isn't missing.
                self._synced = True
                for key in list(self._store.clusters):
                    self._changed(key)
                if on_ready is not None:
                    await on_ready()
        finally:
            await asyncio.gather(*(lease.release() for lease in self._leases.values()))

    async def hold(self, namespace: str) -> None:
        """Waits until this is the one operator there, also where it looks after all namespaces."""
        async with self._gates.setdefault(namespace, asyncio.Lock()):
            if namespace not in self._leases:
                await self._acquire(namespace, namespace, names.OPERATOR)

    async def _acquire(self, what: str, namespace: str, name: str) -> None:
        lease = Lease(self._api, namespace, name, self._settings.lease_s)
        await lease.acquire()
        self._leases[what] = lease
        self._tasks.create_task(self._keep(what, lease))

    async def _keep(self, what: str, lease: Lease) -> None:
        try:
            await lease.keep()
        except LeaseGone as error:
            if what == _EVERYWHERE:
                raise LeaseLost(str(error)) from error
            logger.warning("%s", error)
            del self._leases[what]

    def _informers(self, namespace: str | None) -> list[Informer]:
        store = self._store
        return [
            Informer(
                self._api,
                core_path("pods", namespace),
                names.CLUSTER,
                namespace,
                store.pods_listed,
                store.put_pod,
                store.drop_pod,
                self._changed,
            ),
            Informer(
                self._api,
                core_path("services", namespace),
                names.CLUSTER,
                namespace,
                store.services_listed,
                store.put_service,
                store.drop_service,
                self._changed,
            ),
            Informer(
                self._api,
                clusters_path(namespace),
                "",
                namespace,
                store.clusters_listed,
                store.put_cluster,
                store.drop_cluster,
                self._changed,
            ),
        ]

    def _changed(self, key: Key) -> None:
        if not self._synced:
            return
        raw = self._store.clusters.get(key)
        tending = self._tending.get(key)
        if tending is None and raw is not None and is_claimed(raw, self._settings.all_clusters):
            tending = self._tending[key] = Tending(self, key)
            tending.task = self._tasks.create_task(tending.run())
        if tending is not None:
            tending.changed.set()

    def may_write(self, namespace: str) -> None:
        if namespace not in self._leases:
            raise LeaseGone(f"the lease in {namespace} is gone")
        for lease in (self._leases[namespace], self._leases.get(_EVERYWHERE)):
            if lease is not None and not lease.valid:
                raise LeaseLost(f"the lease in {lease.namespace} has run out")

    def ours(self, key: Key) -> Mapping[str, Any] | None:
        raw = self._store.clusters.get(key)
        if (
            raw is None
            or raw["metadata"].get("deletionTimestamp")
            or not is_claimed(raw, self._settings.all_clusters)
        ):
            return None
        return raw

    def forget(self, key: Key) -> None:
        self._tending.pop(key, None)

    @property
    def api(self) -> Api:
        return self._api

    @property
    def store(self) -> Store:
        return self._store

    @property
    def slots(self) -> asyncio.Semaphore:
        return self._slots
