"""One cluster's task: does what ``reconcile`` decides, and writes the status.

What leaves goes first, and all at once; replicas come one after the other, each whole or not at all. What
fails holds up nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from everstep.kube import actions, grouplabels, status as describing
from everstep.kube.actions import Action, Announce, CreateReplica, Plan
from everstep.kube.api import (
    UNREACHABLE,
    ApiError,
    clusters_path,
    said,
)
from everstep.kube.backoff import (
    HEAD,
    ApiRefusal,
    ReplicaFailure,
    of_pod,
    of_pod_group,
    of_service,
    remembered,
)
from everstep.kube.cluster_objects import ClusterObjects
from everstep.kube.facts import holds
from everstep.kube.lease import LeadershipLost, LeaseGone
from everstep.kube.nodes import on_nodes
from everstep.kube.reconcile import Observed, reconcile
from everstep.kube.spec import ClusterSpec, parse
from everstep.kube.store import Key
from everstep.kube.validation import problems, unsupported
from everstep.kube.waiting import all_of, is_set_within

if TYPE_CHECKING:
    from everstep.kube.operator import Operator

_SETTLE_S = 0.05
"""Changes come in flocks; this much later there is one thing to do about them."""
_LONGEST_PAUSE_S = 60.0
_AT_ONCE = 16
"""Requests of one cluster. More would only wait elsewhere, and the last of thousands time out there."""

logger = logging.getLogger("everstep.kube")
Outcome = TypeVar("Outcome")


class ClusterLoop:
    """One cluster's task."""

    def __init__(self, operator: Operator, key: Key) -> None:
        self._operator, self._key = operator, key
        self._namespace, self._name = key
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)
        """Its own: requests that hang here hold up no other cluster."""
        self._objects = ClusterObjects(operator, key)
        self._refusals: dict[str, ApiRefusal] = {}
        self._failures: dict[tuple[str, int], ReplicaFailure] = {}
        self._look_at: float | None = None
        """When what is known of nodes may mean something else."""
        self._written: Mapping[str, Any] | None = None
        """The status as it was last sent."""
        self._acknowledged: Mapping[str, Any] = {}
        """And as it was kept: another CRD may not keep all of it."""

    async def run(self) -> None:
        pause = 0.0
        wake_at: float | None = None
        while True:
            await self._wait(wake_at)
            if self._operator.ours(self._key) is None:
                self._operator.forget(self._key)
                return
            try:
                await self._operator.hold(self._namespace)
                # That may have taken long.
                raw = self._operator.ours(self._key)
                wake_at = await self._once(raw) if raw is not None else 0.0
                pause = 0.0
                continue
            except (ApiError, LeaseGone, LeadershipLost, *UNREACHABLE) as error:
                logger.warning("%s/%s: %s", *self._key, said(error))
            except Exception:
                # A bug, and the trouble of this cluster: the others go on.
                logger.exception("%s/%s: this is a bug in the operator", *self._key)
            # A change in the meantime is handled at once.
            pause = min(max(0.5, pause * 2), _LONGEST_PAUSE_S)
            wake_at = time.time() + pause

    async def _wait(self, wake_at: float | None) -> None:
        timeout = None if wake_at is None else max(0.0, wake_at - time.time())
        if await is_set_within(self.changed, timeout):
            await asyncio.sleep(_SETTLE_S)
        self.changed.clear()

    async def _label_groups(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """The autoscaler reads of each group what it needs to know. The cluster as it is then."""
        change = grouplabels.change(parse(raw), raw["metadata"]["resourceVersion"])
        if not change:
            return raw
        self._operator.may_write(self._namespace)
        path = clusters_path(self._namespace, self._name)
        try:
            raw = await self._operator.api.patch(path, change, grouplabels.JSON_PATCH)
        except ApiError as error:
            # It has changed meanwhile, and comes here again; or it may not be changed, and works as it is.
            logger.warning("%s/%s: its groups can't be labelled: %s", *self._key, error)
            return raw
        self._operator.store.put_cluster(raw)
        return raw

    async def _once(self, raw: Mapping[str, Any]) -> float | None:
        if raw["metadata"]["uid"] != self._objects.uid:
            self._objects.uid = raw["metadata"]["uid"]
            self._refusals = describing.refusals(raw.get("status") or {})
            self._failures = describing.failures(raw.get("status") or {})
            self._written = None
        before = self._status_before()
        generation = raw["metadata"].get("generation", 0)
        wrong = problems(raw)
        if wrong:
            refused = describing.refuse(wrong, generation, before, time.time())
            if refused["reason"] != before.get("reason"):
                await self._operator.events.publish(
                    raw, Announce(True, "InvalidRayClusterSpec", refused["reason"])
                )
            await self._say(refused)
            return None
        raw = await self._label_groups(raw)
        cluster = parse(raw)
        began = time.perf_counter()
        plan = reconcile(cluster, self._observed(), time.time())
        took = time.perf_counter() - began
        if plan.actions:
            logger.debug("%s/%s: %d actions, decided in %.1f ms", *self._key, len(plan.actions), took * 1e3)
        await self._carry_out(cluster, raw, plan)
        await self._tell_what_was_made(raw)
        if plan.actions:
            self.changed.set()  # what was done may have made more to do
        self._failures = remembered(self._failures, time.time())
        described = describing.describe(cluster, self._observed(), unsupported(raw), before, time.time())
        self._operator.metrics.described(self._key, described)
        await self._say(described)
        return min((at for at in (plan.wake_at, self._look_at) if at is not None), default=None)

    def _status_before(self) -> Mapping[str, Any]:
        if self._written is not None:
            return self._written
        raw = self._operator.store.clusters.get(self._key) or {}
        return raw.get("status") or {}

    def _observed(self) -> Observed:
        store = self._operator.store
        pods, self._look_at = on_nodes(store.pods(self._key), store.nodes, time.time())
        pod_groups = store.pod_groups(self._key)
        there = {of_pod(pod.name) for pod in pods} | {of_pod_group(pod.pod_group) for pod in pods}
        there |= {of_pod_group(name) for name in pod_groups or ()}
        self._refusals = {
            what: refusal
            for what, refusal in self._refusals.items()
            if what in there or not what.startswith((of_pod(""), of_pod_group("")))
        }
        return Observed(
            pods=pods,
            services=store.services(self._key),
            refusals=dict(self._refusals),
            failures=dict(self._failures),
            served=store.served,
            pod_groups=pod_groups,
            suspending=holds(self._status_before(), "RayClusterSuspending"),
            vacated=store.vacated(self._key),
        )

    async def _carry_out(self, cluster: ClusterSpec, raw: Mapping[str, Any], plan: Plan) -> None:
        """All of it, also if parts of it fail."""
        for action in plan.actions:
            if isinstance(action, Announce) and action.reason == "ReplicaReplaced":
                self._operator.metrics.replaced(self._key, action.group)
        others = [action for action in plan.actions if not isinstance(action, CreateReplica)]
        await all_of(self._do(cluster, raw, action) for action in others)
        # Fresh facts, fresh chances: a refusal of an older spec is over.
        self._refusals = {n: r for n, r in self._refusals.items() if r.generation == cluster.generation}
        # Groups take turns, and what heals goes before what grows.
        creations = [action for action in plan.actions if isinstance(action, CreateReplica)]
        creations.sort(key=lambda creation: (not creation.heals, creation.index))
        stopped: set[str] = set()
        made: dict[str, list[CreateReplica]] = {}
        for creation in creations:
            if not self._is_current(raw):
                break  # this was decided for another spec
            if creation.group in stopped:
                continue
            if await self._create_replica(cluster, raw, creation):
                made.setdefault(creation.group, []).append(creation)
            else:
                stopped.add(creation.group)
        self._objects.made += [_created_workers(group, replicas) for group, replicas in made.items()]

    async def _tell_what_was_made(self, raw: Mapping[str, Any]) -> None:
        """With KubeRay's names. Last, so that nothing waits for events to be written."""
        notes, self._objects.made = self._objects.made, []
        await all_of(self._operator.events.publish(raw, note) for note in notes)

    def _is_current(self, raw: Mapping[str, Any]) -> bool:
        now = self._operator.ours(self._key)
        return now is not None and all(
            now["metadata"].get(key) == raw["metadata"].get(key) for key in ("uid", "generation")
        )

    async def _do(self, cluster: ClusterSpec, raw: Mapping[str, Any], action: Action) -> None:
        async with self._slots:
            match action:
                case Announce():
                    await self._operator.events.publish(raw, action)
                case actions.Remember(failure=failure):
                    self._failures[failure.group, failure.index] = failure
                case actions.CreateService(manifest=manifest):
                    name = manifest["metadata"]["name"]
                    writing = self._objects.create_service(manifest)
                    await self._try(cluster, raw, of_service(name), f"Service {name}", writing)
                case actions.ChangeService(name=name, change=change):
                    logger.info("%s/%s: changing the Service %s: %s", *self._key, name, change)
                    writing = self._objects.change_service(name, change)
                    await self._try(cluster, raw, of_service(name), f"Service {name}", writing)
                case actions.DeletePod(name=name):
                    logger.info("%s/%s: deleting %s: %s", *self._key, name, action.reason)
                    deleting = self._objects.delete_pod(name, action.uid)
                    await self._try(cluster, raw, of_pod(name), f"the end of {name}", deleting)
                case actions.CreatePodGroup(manifest=manifest):
                    name = manifest["metadata"]["name"]
                    writing = self._objects.create_pod_group(manifest)
                    await self._try(cluster, raw, of_pod_group(name), f"PodGroup {name}", writing)
                case actions.DeletePodGroup(name=name, uid=uid, api=api):
                    deleting = self._objects.delete_pod_group(name, uid, api)
                    await self._try(cluster, raw, of_pod_group(name), f"the end of PodGroup {name}", deleting)
                case actions.LabelPod(name=name):
                    await self._try(
                        cluster, raw, of_pod(name), f"{name}'s label", self._objects.label_pod(action)
                    )
                case actions.CreateHead():
                    await self._try(cluster, raw, HEAD, "the head", self._objects.create_head(action))
                case CreateReplica():
                    raise AssertionError("replicas are made one after the other")

    async def _try(
        self, cluster: ClusterSpec, raw: Mapping[str, Any], what: str, subject: str, doing: Awaitable[None]
    ) -> None:
        """Try it. An error leads to another try later, and holds up nothing else."""
        try:
            await doing
            self._refusals.pop(what, None)
        except (ApiError, *UNREACHABLE) as error:
            await self._refused(cluster, raw, what, subject, error)

    async def _create_replica(
        self, cluster: ClusterSpec, raw: Mapping[str, Any], action: CreateReplica
    ) -> bool:
        """All of its Pods. If one can't be had, those that could are given back."""
        logger.info(
            "%s/%s: creating replica %d of %s, %s", *self._key, action.index, action.group, action.name
        )
        pod_group = action.pod_group(cluster)
        if pod_group is not None:
            try:
                await self._objects.create_pod_group(pod_group)
            except (ApiError, *UNREACHABLE) as error:
                subject = f"the PodGroup of replica {action.index} of {action.group}"
                await self._refused(cluster, raw, action.refused_as, subject, error, growth=not action.heals)
                return False
        creating = [self._in_turn(self._objects.create_pod(pod)) for pod in action.manifests(cluster)]
        made = await asyncio.gather(*creating, return_exceptions=True)
        failures = [outcome for outcome in made if isinstance(outcome, BaseException)]
        if not failures:
            self._refusals.pop(action.refused_as, None)
            return True
        made_pods = [outcome for outcome in made if not isinstance(outcome, BaseException)]
        # Those that can't be given back are found again: a replica that isn't whole.
        for outcome in await asyncio.gather(
            *(
                self._in_turn(self._objects.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"]))
                for pod in made_pods
            ),
            return_exceptions=True,
        ):
            if outcome is not None and not isinstance(outcome, (ApiError, *UNREACHABLE)):
                raise outcome
        # A refusal says more than an answer that didn't come.
        failures.sort(key=lambda failure: not isinstance(failure, ApiError) or failure.passing)
        if not isinstance(failures[0], (ApiError, *UNREACHABLE)):
            raise failures[0]
        what = f"replica {action.index} of {action.group}"
        await self._refused(cluster, raw, action.refused_as, what, failures[0], growth=not action.heals)
        return False

    async def _in_turn(self, doing: Awaitable[Outcome]) -> Outcome:
        async with self._slots:
            return await doing

    async def _refused(
        self,
        cluster: ClusterSpec,
        raw: Mapping[str, Any],
        what: str,
        subject: str,
        error: Exception,
        growth: bool = False,
    ) -> None:
        before = self._refusals.get(what)
        message = error.message if isinstance(error, ApiError) else said(error)
        refusal = self._refusals[what] = ApiRefusal(
            reason="QuotaExceeded" if "exceeded quota" in message else "Refused",
            message=message,
            attempts=before.attempts + 1 if before else 1,
            at=time.time(),
            generation=cluster.generation,
            growth=growth,
            passing=not isinstance(error, ApiError) or error.passing,
        )
        logger.warning("%s/%s: %s is refused: %s", *self._key, subject, said(error))
        if refusal.lasts:
            after = refusal.retry_at - refusal.at
            note = f"{subject} is refused: {message}; again in {after:.0f} s"
            await self._operator.events.publish(raw, Announce(True, refusal.reason, note, what))

    async def _say(self, status: Mapping[str, Any]) -> None:
        raw = self._operator.ours(self._key)
        if raw is None or raw["metadata"]["uid"] != self._objects.uid:
            return
        there = raw.get("status") or {}
        # The same as before, and nobody else has written over it.
        if status == self._written and there == self._acknowledged:
            return
        self._operator.may_write(self._namespace)
        path = clusters_path(self._namespace, self._name, "status")
        change = {"metadata": {"uid": self._objects.uid}, "status": _difference(there, status)}
        try:
            answer = await self._operator.api.patch(path, change)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return  # deleted, or another one of this name by now: its own events follow
        self._operator.store.put_cluster(answer)
        self._written, self._acknowledged = status, answer.get("status") or {}


def _created_workers(group: str, replicas: Sequence[CreateReplica]) -> Announce:
    """One event for all that a group got at once: a thousand Pods are not worth a thousand of them."""
    pods = [pod for replica in replicas for pod in replica.pods]
    indices = ", ".join(str(replica.index) for replica in replicas)
    message = f"Created {len(pods)} worker Pods of {group}, replicas {indices}: {', '.join(pods)}"
    return Announce(False, "CreatedWorkerPod", message, group, group)


def _difference(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch that makes one of the other."""
    change: dict[str, Any] = {key: None for key in there if key not in wanted}
    for key, value in wanted.items():
        known = there.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            change[key] = _difference(known, value)
        elif value != known:
            change[key] = value
    return change
