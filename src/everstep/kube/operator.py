"""The hands: hears of changes, asks ``reconcile`` what to do, does it, and says so in the status.

Each cluster has a task of its own, so that none waits for another. In a cluster, what leaves goes first and
all at once; replicas come one after the other, each whole or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from everstep.kube import names, status as describing
from everstep.kube.api import UNREACHABLE, Api, ApiError, clusters_path, core_path, path_for
from everstep.kube.informer import Informer
from everstep.kube.lease import Lease, LeaseLost
from everstep.kube.reconcile import (
    Action,
    CreateHead,
    CreateReplica,
    CreateService,
    DeletePod,
    LabelPod,
    Observed,
    Plan,
    Refusal,
    Tell,
    reconcile,
)
from everstep.kube.spec import Cluster, Manifest, parse
from everstep.kube.store import Key, Store
from everstep.kube.validation import problems, unsupported

_SETTLE_S = 0.05
"""Changes come in flocks; this much later there is one thing to do about them."""
_AT_ONCE = 16
_LONGEST_PAUSE_S = 60.0

logger = logging.getLogger("everstep.kube")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    namespaces: tuple[str, ...] = ()
    """Those that are watched; none means all."""
    all_clusters: bool = False
    """Also those that don't carry the annotation."""
    lease_namespace: str = "default"
    """Where the lease is, for an operator that watches all namespaces."""
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
        self._leases = [
            Lease(api, namespace, settings.lease_s)
            for namespace in settings.namespaces or (settings.lease_namespace,)
        ]
        self._tending: dict[Key, _Tending] = {}
        self._synced = False
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def run(self, on_ready: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until it is cancelled, or can't be the operator any more."""
        for lease in self._leases:
            await lease.acquire()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for lease in self._leases:
                    tasks.create_task(lease.keep())
                informers = [
                    i
                    for namespace in self._settings.namespaces or (None,)
                    for i in self._informers(namespace)
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
            for lease in self._leases:
                await lease.release()

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
            tending = self._tending[key] = _Tending(self, key)
            tending.task = self._tasks.create_task(tending.run())
        if tending is not None:
            tending.changed.set()

    def may_write(self) -> None:
        if not all(lease.valid for lease in self._leases):
            raise LeaseLost("the lease has run out")

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


class _Tending:
    """One cluster's task."""

    def __init__(self, operator: Operator, key: Key) -> None:
        self._operator, self._key = operator, key
        self._namespace, self._name = key
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._uid = ""
        self._refusals: dict[str, Refusal] = {}
        self._written: Mapping[str, Any] | None = None
        """The status as it was last acknowledged: another CRD may not have kept all of it."""

    async def run(self) -> None:
        pause = 0.0
        wake_at: float | None = None
        while True:
            await self._wait(wake_at)
            raw = self._operator.ours(self._key)
            if raw is None:
                self._operator.forget(self._key)
                return
            try:
                wake_at = await self._once(raw)
                pause = 0.0
            except (ApiError, *UNREACHABLE) as error:
                pause = min(max(0.5, pause * 2), _LONGEST_PAUSE_S)
                logger.warning("%s/%s: %s; again in %.1f s", *self._key, error or type(error).__name__, pause)
                await asyncio.sleep(pause)
                self.changed.set()

    async def _wait(self, wake_at: float | None) -> None:
        timeout = None if wake_at is None else max(0.0, wake_at - time.time())
        try:
            await asyncio.wait_for(self.changed.wait(), timeout)
            await asyncio.sleep(_SETTLE_S)
        except TimeoutError:
            pass
        self.changed.clear()

    async def _once(self, raw: Mapping[str, Any]) -> float | None:
        if raw["metadata"]["uid"] != self._uid:
            self._uid = raw["metadata"]["uid"]
            self._refusals = describing.refusals(raw.get("status") or {})
            self._written = None
        before = self._written if self._written is not None else raw.get("status") or {}
        generation = raw["metadata"].get("generation", 0)
        wrong = problems(raw)
        if wrong:
            await self._say(raw, describing.refuse(wrong, generation, before, time.time()), before)
            return None
        cluster = parse(raw)
        began = time.perf_counter()
        plan = reconcile(cluster, self._observed(), time.time())
        took = time.perf_counter() - began
        if plan.actions:
            logger.debug("%s/%s: %d actions, decided in %.1f ms", *self._key, len(plan.actions), took * 1e3)
        try:
            await self._carry_out(cluster, raw, plan)
        finally:
            if plan.actions:
                self.changed.set()  # what was done may have made more to do
        described = describing.describe(cluster, self._observed(), unsupported(raw), before, time.time())
        await self._say(raw, described, before)
        return plan.wake_at

    def _observed(self) -> Observed:
        store = self._operator.store
        return Observed(
            pods=store.pods(self._key), services=store.services(self._key), refusals=dict(self._refusals)
        )

    async def _carry_out(self, cluster: Cluster, raw: Mapping[str, Any], plan: Plan) -> None:
        creations = [action for action in plan.actions if isinstance(action, CreateReplica)]
        others = [action for action in plan.actions if not isinstance(action, CreateReplica)]
        await _all(self._do(cluster, raw, action) for action in others)
        # Fresh facts, fresh chances: a refusal of an older spec is over.
        self._refusals = {n: r for n, r in self._refusals.items() if r.generation == cluster.generation}
        refused: set[str] = set()
        for creation in creations:
            if creation.group not in refused and not await self._create_replica(cluster, raw, creation):
                refused.add(creation.group)

    async def _do(self, cluster: Cluster, raw: Mapping[str, Any], action: Action) -> None:
        async with self._operator.slots:
            match action:
                case Tell():
                    await self._tell(raw, action)
                case CreateService(manifest=manifest):
                    await self._create_once(manifest)
                case DeletePod():
                    logger.info("%s/%s: deleting %s: %s", *self._key, action.name, action.reason)
                    await self._delete(action.name, action.uid)
                case LabelPod():
                    await self._label(action)
                case CreateHead():
                    await self._create_head(cluster, raw, action)
                case CreateReplica():
                    raise AssertionError("replicas are made one after the other")

    async def _create_once(self, manifest: Manifest) -> None:
        self._operator.may_write()
        try:
            made = await self._operator.api.create(path_for(manifest), manifest)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            if manifest["kind"] != "Service":
                return
            made = await self._operator.api.get(f"{path_for(manifest)}/{manifest['metadata']['name']}")
            made["metadata"].setdefault("labels", {})[names.CLUSTER] = self._name
        if manifest["kind"] == "Service":
            self._operator.store.put_service(made)

    async def _create_head(self, cluster: Cluster, raw: Mapping[str, Any], action: CreateHead) -> None:
        for manifest in action.beside:
            await self._create_once(manifest)
        try:
            await self._create_pod(action.manifest)
        except ApiError as error:
            if error.passing:
                raise
            await self._refused(cluster, raw, names.HEAD_GROUP, "the head", error)
        else:
            self._refusals.pop(names.HEAD_GROUP, None)

    async def _create_replica(self, cluster: Cluster, raw: Mapping[str, Any], action: CreateReplica) -> bool:
        """All of its Pods. If one can't be had, those that could are given back."""
        logger.info(
            "%s/%s: creating replica %d of %s, %s", *self._key, action.index, action.group, action.name
        )
        made = await asyncio.gather(*(self._create_pod(pod) for pod in action.pods), return_exceptions=True)
        failures = [outcome for outcome in made if isinstance(outcome, BaseException)]
        if not failures:
            self._refusals.pop(action.group, None)
            return True
        made_pods = [outcome for outcome in made if not isinstance(outcome, BaseException)]
        await _all(self._delete(pod["metadata"]["name"], pod["metadata"]["uid"]) for pod in made_pods)
        final = next((f for f in failures if isinstance(f, ApiError) and not f.passing), None)
        if final is None:
            raise failures[0]
        what = f"replica {action.index} of {action.group}"
        await self._refused(cluster, raw, action.group, what, final)
        return False

    async def _create_pod(self, manifest: Manifest) -> dict[str, Any]:
        self._operator.may_write()
        made = await self._operator.api.create(path_for(manifest), manifest)
        self._operator.store.put_pod(made)
        return made

    async def _refused(
        self, cluster: Cluster, raw: Mapping[str, Any], group: str, what: str, error: ApiError
    ) -> None:
        before = self._refusals.get(group)
        reason = "QuotaExceeded" if "exceeded quota" in error.message else "PodsRefused"
        refusal = self._refusals[group] = Refusal(
            reason=reason,
            message=error.message,
            attempts=before.attempts + 1 if before else 1,
            at=time.time(),
            generation=cluster.generation,
        )
        logger.warning("%s/%s: %s can't be made whole: %s", *self._key, what, error)
        after = int(refusal.retry_at - refusal.at)
        await self._tell(
            raw, Tell(True, reason, f"{what} can't be made whole: {error.message}; again in {after} s")
        )

    async def _delete(self, name: str, uid: str) -> None:
        self._operator.may_write()
        try:
            path = core_path("pods", self._namespace, name)
            left = await self._operator.api.delete(path, {"preconditions": {"uid": uid}})
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and "UID" in error.message):
                self._operator.store.forget_pod(self._key, uid)
                return
            raise
        if left.get("kind") == "Pod" and left["metadata"].get("deletionTimestamp"):
            self._operator.store.put_pod(left)

    async def _label(self, action: LabelPod) -> None:
        self._operator.may_write()
        change = {
            "metadata": {
                "uid": action.uid,
                "labels": dict(action.labels),
                "annotations": {names.HOSTS: str(action.hosts)},
            }
        }
        logger.info("%s/%s: taking in %s as %s", *self._key, action.name, action.labels)
        made = await self._operator.api.patch(core_path("pods", self._namespace, action.name), change)
        self._operator.store.put_pod(made)

    async def _tell(self, raw: Mapping[str, Any], note: Tell) -> None:
        meta = raw["metadata"]
        stamp = describing.stamp(time.time())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta['name'][:50]}.", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": raw.get("apiVersion", f"{names.GROUP}/{names.VERSION}"),
                "kind": names.KIND,
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "type": "Warning" if note.warning else "Normal",
            "reason": note.reason,
            "message": note.message[:1000],
            "source": {"component": names.OPERATOR},
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            await self._operator.api.create(core_path("events", meta["namespace"]), event)
        except ApiError as error:
            logger.warning("%s/%s: no event could be written: %s", *self._key, error)

    async def _say(
        self, raw: Mapping[str, Any], status: Mapping[str, Any], before: Mapping[str, Any]
    ) -> None:
        if status == before:
            return
        self._operator.may_write()
        gone = {key: None for key in before if key not in status}
        path = clusters_path(self._namespace, self._name, "status")
        change = {"metadata": {"uid": raw["metadata"]["uid"]}, "status": {**status, **gone}}
        try:
            self._operator.store.put_cluster(await self._operator.api.patch(path, change))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return  # deleted, or another one of this name by now: its own events follow
        self._written = status


async def _all(doing: Iterable[Awaitable[None]]) -> None:
    """All of them, whatever becomes of the others; then the first error."""
    outcomes: Sequence[BaseException | None] = await asyncio.gather(*doing, return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
