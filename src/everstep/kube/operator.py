"""Hears of changes, and gives each cluster that is ours a task of its own (``cluster_loop``), so that none
waits for another. Holds the leases: in each namespace one operator writes.

Each namespace is managed by itself: one that is gone, or that another operator holds, keeps nothing from
the others. An operator that loses its lease stays, writes nothing, and goes on once it has it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from everstep.kube import names
from everstep.kube.actions import Announce
from everstep.kube.api import (
    UNREACHABLE,
    Api,
    ApiError,
    clusters_path,
    core_path,
    patiently,
    pod_groups_path,
    said,
)
from everstep.kube.cluster_loop import ClusterLoop
from everstep.kube.events import Events
from everstep.kube.gangs import GANGS, served
from everstep.kube.informer import Informer
from everstep.kube.lease import Election, LeaderLease, LeadershipLost, LeaseGone
from everstep.kube.metrics import OperatorMetrics, Readiness
from everstep.kube.store import Key, ObjectCache
from everstep.kube.unserved_kinds import UnservedKinds

_EVERYWHERE = ""
"""In the place of a namespace: all of them."""
_AGAIN_S = 2.0

logger = logging.getLogger("everstep.kube")


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    namespaces: tuple[str, ...] = ()
    """Those that are watched; none means all."""
    all_clusters: bool = False
    """Also those that don't carry the annotation."""
    lease_namespace: str = "default"
    """Where operators that watch all namespaces have the lease that makes one of them the one."""
    election: Election = Election()


def is_claimed(raw: Mapping[str, Any], all_clusters: bool) -> bool:
    """Whether a cluster is this operator's to run."""
    managed_by = (raw.get("spec") or {}).get("managedBy")
    if managed_by not in (None, names.MANAGED_BY_US):
        return False
    annotations = raw["metadata"].get("annotations") or {}
    return all_clusters or annotations.get(names.MANAGED) == "true"


def is_held_by_kuberay(raw: Mapping[str, Any]) -> bool:
    meta = raw["metadata"]
    return bool(meta.get("deletionTimestamp")) and names.REDIS_FINALIZER in (meta.get("finalizers") or ())


class Operator:
    def __init__(self, api: Api, settings: OperatorSettings) -> None:
        self._api = api
        self.metrics = OperatorMetrics()
        api.on_answer = self.metrics.called
        self._settings = settings
        self._store = ObjectCache()
        self._events = Events(api)
        self._leases: dict[str, LeaderLease] = {}
        self._known: list[LeaderLease] = []
        """Also those that are only waited for."""
        self._gates: dict[str, asyncio.Lock] = {}
        self._informers: dict[str | None, list[Informer]] = {}
        self._loops: dict[Key, ClusterLoop] = {}
        self._synced: set[str | None] = set()
        self._started = False

    async def run(self, on_ready: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until it is cancelled."""
        namespaces: tuple[str | None, ...] = self._settings.namespaces or (None,)
        settled = {namespace: asyncio.Event() for namespace in namespaces}
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._follow_nodes())
                for namespace in namespaces:
                    tasks.create_task(self._look_after(namespace, settled[namespace]))
                for event in settled.values():
                    await event.wait()
                if on_ready is not None:
                    await on_ready()
                self._started = True
        finally:
            await asyncio.gather(*(lease.release() for lease in self._leases.values()))

    @property
    def ready(self) -> Readiness:
        """One that stands by is ready to work, and a webhook is served by each."""
        standing_by = any(lease.standing_by for lease in self._known)
        if not all(lease.ours.is_set() or lease.standing_by for lease in self._known):
            return Readiness.CUT_OFF
        if not self._started and not standing_by:
            return Readiness.STARTING
        return Readiness.STANDING_BY if standing_by else Readiness.WORKING

    async def _look_after(self, namespace: str | None, settled: asyncio.Event) -> None:
        if namespace is None:
            await self._acquire(_EVERYWHERE, self._settings.lease_namespace, f"{names.OPERATOR}-everywhere")
        else:
            await self._wait_for(namespace, settled)
        self._store.served = await self._served()
        informers = self._informers[namespace] = self._make_informers(namespace)
        for informer in informers:
            self._tasks.create_task(informer.run())
        for informer in (pod_groups := self._make_pod_group_informers(namespace)):
            self._tasks.create_task(self._follow_pod_groups(informer, informers))
        informers += pod_groups
        for informer in list(informers):
            await informer.synced.wait()
        # Not before everything was seen once: what isn't known yet isn't missing.
        self._synced.add(namespace)
        for key in list(self._store.clusters):
            self._changed(key)
        settled.set()
        await UnservedKinds(self._api, namespace, self._events).run()

    async def _wait_for(self, namespace: str, settled: asyncio.Event) -> None:
        """Until there is such a namespace, and its lease is ours. The others are looked after meanwhile."""
        while True:
            try:
                return await self.hold(namespace)
            except LeaseGone as error:
                if not settled.is_set():
                    logger.warning("%s", error)
                settled.set()
                await asyncio.sleep(_AGAIN_S)

    async def hold(self, namespace: str) -> None:
        """Waits until this is the one operator there, also where it looks after all namespaces."""
        async with self._gates.setdefault(namespace, asyncio.Lock()):
            if namespace not in self._leases:
                await self._acquire(namespace, namespace, names.OPERATOR)
        for lease in (self._leases.get(namespace), self._leases.get(_EVERYWHERE)):
            if lease is not None:
                await lease.ours.wait()

    async def _acquire(self, what: str, namespace: str, name: str) -> None:
        lease = LeaderLease(self._api, namespace, name, self._settings.election)
        self._known.append(lease)
        try:
            await lease.acquire()
        except LeaseGone:
            self._known.remove(lease)
            raise
        lease.ours.set()
        self.metrics.leads(what, True)
        self._leases[what] = lease
        self._tasks.create_task(self._keep(what, lease))

    async def _keep(self, what: str, lease: LeaderLease) -> None:
        """For as long as it can be had. Without it nothing is written; with it again, everything is
        reconciled anew, since another operator may have been here meanwhile.
        """
        while True:
            try:
                await lease.keep()
            except LeadershipLost as error:
                logger.error("%s: nothing more is written until it is back", error)
            except LeaseGone as error:
                logger.warning("%s", error)
                if what != _EVERYWHERE:
                    # Likely its namespace is. Whoever has a cluster there asks for it again.
                    lease.ours.clear()
                    self.metrics.leads(what, False)
                    del self._leases[what]
                    self._known.remove(lease)
                    lease.ours.set()  # tasks that wait for it find that it is no more
                    return
            lease.ours.clear()
            self.metrics.leads(what, False)
            await self._regain(lease)
            await self._look_again(what)
            lease.ours.set()
            self.metrics.leads(what, True)

    async def _served(self) -> frozenset[str]:
        """Whose PodGroups are installed. A scheduler that comes later is found by the next operator."""
        try:
            there = served(await patiently(lambda: self._api.get("/apis"))) & {
                gang.api for gang in GANGS if gang.api
            }
        except (ApiError, *UNREACHABLE) as error:
            logger.warning("which APIs there are can't be seen: %s", said(error))
            return frozenset()
        known = {gang.api for gang in GANGS if gang.api}
        return frozenset([api for api in sorted(there & known) if await self._has_pod_groups(api)])

    async def _has_pod_groups(self, api: str) -> bool:
        """An API may be listed without them: Kubernetes' own has others beside."""
        try:
            resources = (await patiently(lambda: self._api.get(f"/apis/{api}")))["resources"]
        except (ApiError, *UNREACHABLE) as error:
            logger.warning("what is in %s can't be seen, so its PodGroups aren't used: %s", api, said(error))
            return False
        return any(resource["name"] == "podgroups" for resource in resources)

    async def _follow_pod_groups(self, informer: Informer, informers: list[Informer]) -> None:
        """Those whose replica is gone go, too. Where they may not be seen, they stay."""
        try:
            await informer.run()
        except ApiError as error:
            logger.warning("PodGroups can't be watched, so that empty ones are left: %s", error.message)
            self._store.sees_pod_groups = False
            informers.remove(informer)
            informer.synced.set()

    async def _follow_nodes(self) -> None:
        """Nodes aren't in a namespace. Without access to them, their end shows in their Pods, later."""
        store = self._store

        def listed(_: str | None, items: Iterable[Any], version: int) -> set[Key]:
            return store.clusters_on(store.nodes_listed(items, version))

        def put(raw: Any) -> None:
            store.put_node(raw)
            for key in store.clusters_on({raw["metadata"]["name"]}):
                self._changed(key)

        def drop(raw: Any) -> None:
            store.drop_node(raw)
            for key in store.clusters_on({raw["metadata"]["name"]}):
                self._changed(key)

        informer = Informer(self._api, core_path("nodes", None), "", None, listed, put, drop, self._changed)
        try:
            await informer.run()
        except ApiError as error:
            logger.warning("nodes can't be watched, so that their end is heard of late: %s", error.message)

    async def _regain(self, lease: LeaderLease) -> None:
        while True:
            try:
                return await lease.acquire()
            except LeaseGone as error:
                logger.warning("%s", error)
                await asyncio.sleep(_AGAIN_S)

    async def _look_again(self, what: str) -> None:
        informers = [
            informer
            for namespace, group in self._informers.items()
            if what == _EVERYWHERE or namespace in (None, what)
            for informer in group
        ]
        while True:
            try:
                await asyncio.gather(*(informer.list_now() for informer in informers))
                return
            except (ApiError, *UNREACHABLE) as error:
                logger.warning("what is there can't be listed: %s", said(error))
                await asyncio.sleep(_AGAIN_S)

    def _make_informers(self, namespace: str | None) -> list[Informer]:
        store, changed = self._store, self._changed
        pods = (core_path("pods", namespace), names.CLUSTER)
        services = (core_path("services", namespace), names.CLUSTER)
        clusters = (clusters_path(namespace), "")
        return [
            Informer(self._api, *pods, namespace, store.pods_listed, store.put_pod, store.drop_pod, changed),
            Informer(
                self._api,
                *services,
                namespace,
                store.services_listed,
                store.put_service,
                store.drop_service,
                changed,
            ),
            Informer(
                self._api,
                *clusters,
                namespace,
                store.clusters_listed,
                store.put_cluster,
                store.drop_cluster,
                changed,
            ),
        ]

    def _make_pod_group_informers(self, namespace: str | None) -> list[Informer]:
        store, selector = self._store, f"{names.CLUSTER},{names.REPLICA_NAME}"
        return [
            Informer(
                self._api,
                pod_groups_path(gang.api, namespace),
                selector,
                namespace,
                partial(store.pod_groups_listed, gang.api),
                store.put_pod_group,
                store.drop_pod_group,
                self._changed,
            )
            for gang in GANGS
            if gang.spec is not None and gang.api is not None and gang.api in store.served
        ]

    def _changed(self, key: Key) -> None:
        if not {key[0], None} & self._synced:
            return
        raw = self._store.clusters.get(key)
        loop = self._loops.get(key)
        if raw is not None and is_held_by_kuberay(raw) and is_claimed(raw, self._settings.all_clusters):
            self._tasks.create_task(self._let_go(raw))
        if loop is None and raw is not None and is_claimed(raw, self._settings.all_clusters):
            loop = self._loops[key] = ClusterLoop(self, key)
            loop.task = self._tasks.create_task(loop.run())
        if loop is not None:
            loop.changed.set()

    async def _let_go(self, raw: Mapping[str, Any]) -> None:
        """A cluster that came from KubeRay has its finalizer, and nothing else would remove that."""
        meta = raw["metadata"]
        kept = [name for name in meta["finalizers"] if name != names.REDIS_FINALIZER]
        change = {
            "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"], "finalizers": kept}
        }
        message = (
            f"what the head kept in Redis is left there, in the namespace {meta['uid']} unless the spec "
            "names another: remove it when it suits you"
        )
        try:
            await self.hold(meta["namespace"])
            await self._events.publish(raw, Announce(True, "RedisNotCleaned", message))
            await self._api.patch(clusters_path(meta["namespace"], meta["name"]), change)
        except (ApiError, LeaseGone, *UNREACHABLE) as error:
            logger.warning("%s/%s: %s", meta["namespace"], meta["name"], said(error))

    def may_write(self, namespace: str) -> None:
        if namespace not in self._leases:
            raise LeaseGone(f"the lease in {namespace} is gone")
        for lease in (self._leases[namespace], self._leases.get(_EVERYWHERE)):
            if lease is not None and not (lease.valid and lease.ours.is_set()):
                raise LeadershipLost(f"the lease in {lease.namespace} has run out")

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
        self._loops.pop(key, None)
        self.metrics.forget(key)

    @property
    def api(self) -> Api:
        return self._api

    @property
    def store(self) -> ObjectCache:
        return self._store

    @property
    def events(self) -> Events:
        return self._events
