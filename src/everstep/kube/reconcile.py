"""What there is, what there should be, and so what to do. Pure: no clock, no I/O, no memory.

Level-triggered: each call looks at everything anew. What it is shown are the Pods that the API server holds,
including those that the operator has just written and had acknowledged (``store`` sees to that).

The rules, for one worker group:

- A replica lives and dies as one. A Pod of it that is broken, missing or on its way out takes the others
  along.
- Its place is kept while its Pods are leaving, and is filled anew once they are gone. Pods that won't leave
  keep their index, and nothing else: the replacement takes another one.
- Replicas are made whole, at the lowest free indices.
- A healthy replica is only touched because the user asks for it: fewer replicas, ``workersToDelete``,
  suspension, another ``numOfHosts`` (one replica at a time).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence

import msgspec

from everstep.kube import backoff, gangs, headstate, names, pods as build, services, sidecar
from everstep.kube.actions import (
    Action,
    Announce,
    ChangeService,
    CreateHead,
    CreatePodGroup,
    CreateReplica,
    CreateService,
    DeletePod,
    DeletePodGroup,
    LabelPod,
    Plan,
    Remember,
)
from everstep.kube.backoff import ApiRefusal, Failures, ReplicaFailure, remembered
from everstep.kube.replicas import PATIENCE_S, Members, Replica, ReplicaState, adopted, is_stuck, members
from everstep.kube.spec import ClusterSpec, GroupSpec, Upgrade
from everstep.kube.view import PodView, ServiceView

_HALF_BOUND = "some of its hosts have waited for a node while the others held theirs"
A_ROUND = 50
"""Replicas of a group that are made until it is looked again: what should be may have changed meanwhile."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    pods: Sequence[PodView]
    services: Mapping[str, ServiceView] = {}
    """By name."""
    refusals: Mapping[str, ApiRefusal] = {}
    """By what was refused, as ``backoff`` names it."""
    failures: Failures = {}
    served: frozenset[str] = frozenset()
    """The versions of APIs in which the server has PodGroups."""
    pod_groups: gangs.PodGroups | None = None
    """Those of replicas; ``None`` where they can't be seen."""
    suspending: bool = False
    """It is being suspended, and some of its Pods are still there: that is completed first."""
    vacated: Collection[tuple[str, int]] = ()
    """Places, by group and index, whose replicas have lately gone."""


def reconcile(cluster: ClusterSpec, seen: Observed, now: float) -> Plan:
    return _Reconciliation(cluster, seen, now).plan()


class _Reconciliation:
    def __init__(self, cluster: ClusterSpec, seen: Observed, now: float) -> None:
        self.cluster = cluster
        self.seen = seen
        self.now = now
        self.failures = remembered(seen.failures, now)
        self.suspended = cluster.suspend or seen.suspending
        self.gang = gangs.choose(cluster, seen.served)
        self.undeletable = {
            pod.name
            for pod in seen.pods
            if (refusal := seen.refusals.get(backoff.of_pod(pod.name))) is not None and not refusal.passing
        }
        self.wake = [failure.forgotten_at for failure in self.failures.values()]
        self.taken_names = {pod.name for pod in seen.pods} | {pod.replica for pod in seen.pods if pod.replica}
        self.taken_names.update(name for group in cluster.groups for name in group.workers_to_delete)

    def plan(self) -> Plan:
        actions = [*self._services(), *self._head(), *self._left_pod_groups()]
        by_group: dict[str, list[PodView]] = {group.name: [] for group in self.cluster.groups}
        ungrouped: list[PodView] = []
        for pod in self.seen.pods:
            if pod.leaving is not None:
                self.wake.append(pod.leaving + PATIENCE_S + 1)
            if pod.node_type == names.WORKER:
                by_group.get(pod.group, ungrouped).append(pod)
        actions += self._of_no_group(ungrouped)
        creations: list[Action] = []
        for group in self.cluster.groups:
            for action in self._group(group, by_group[group.name]):
                (creations if isinstance(action, CreateReplica) else actions).append(action)
        # What leaves goes first: it may make the room, and the quota, for what comes.
        later = [at for at in self.wake if at > self.now]
        return Plan((*actions, *creations), min(later, default=None))

    def _services(self) -> Iterator[Action]:
        for service in services.wanted(self.cluster):
            name = service["metadata"]["name"]
            there = self.seen.services.get(name)
            change = services.change(there, service) if there is not None else {}
            if (there is None or change) and self._may(backoff.of_service(name)):
                yield CreateService(service) if there is None else ChangeService(name, change)

    def _left_pod_groups(self) -> Iterator[Action]:
        """Those whose replica is gone: an empty one still counts in a queue."""
        there = {pod.replica for pod in self.seen.pods}
        for left in (self.seen.pod_groups or {}).values():
            gone = left.owner == self.cluster.uid and left.replica not in there
            if gone and self._may(backoff.of_pod_group(left.name)):
                yield DeletePodGroup(left.name, left.uid, left.api)

    def _lost_pod_groups(self, group: GroupSpec, replicas: Sequence[Replica]) -> Iterator[Action]:
        """Without it, no scheduler takes a replica's Pods that have no node yet."""
        if self.gang is None or self.seen.pod_groups is None:
            return
        for replica in replicas:
            name = next((pod.pod_group for pod in replica.pods if pod.pod_group), "")
            lost = name and name not in self.seen.pod_groups and replica.hosts == group.num_of_hosts
            made = gangs.pod_group(self.cluster, group, replica.name, self.gang) if lost else None
            if made is not None and self._may(backoff.of_pod_group(name)):
                yield CreatePodGroup(made)

    def _head(self) -> Iterator[Action]:
        heads = [p for p in self.seen.pods if p.node_type == names.HEAD and p.owner is not None]
        live = sorted(
            (p for p in heads if p.leaving is None and p.owner == self.cluster.uid),
            key=lambda p: (p.created, p.name),
        )
        if self.suspended:
            for pod in live:
                yield from self._delete(pod, "the cluster is suspended")
            return
        for pod in live:
            why = "its node is lost" if pod.node_lost else pod.broken or self._ahead_of_its_end(pod)
            if why:
                yield from self._remember(names.HEAD_GROUP, 0, pod.name, "" if pod.node_lost else pod.broken)
                deletion = list(self._delete(pod, why))
                yield from (
                    Announce(True, "HeadReplaced", f"head {pod.name}: {why}", pod.name) for _ in deletion
                )
                yield from deletion
            elif pod is not live[0]:
                yield from self._delete(pod, f"{live[0].name} is the head already")
        # Two heads would be two clusters under one name: the next waits for the last, also for one of an
        # earlier cluster of this name, unless that is stuck.
        if (
            all(is_stuck(pod, self.now) for pod in heads)
            and not self._held(names.HEAD_GROUP, ())
            and self._may(backoff.HEAD)
        ):
            name = self._name(f"{self.cluster.name}-head", f"{self.cluster.uid}/head/{self.now}")
            yield CreateHead(
                build.head_pod(self.cluster, name),
                (*headstate.secret(self.cluster), *sidecar.account(self.cluster)),
            )

    def _of_no_group(self, pods: Sequence[PodView]) -> Iterator[Action]:
        for pod in pods:
            if pod.leaving is None and pod.owner == self.cluster.uid:
                yield from self._delete(pod, f"the cluster has no group {pod.group!r}")

    def _group(self, group: GroupSpec, pods: Sequence[PodView]) -> Iterator[Action]:
        suspended = self.suspended or group.suspend
        if not suspended:
            placed = {pod.uid: pod for pod in adopted(group, pods, self.cluster.uid)}
            pods = [placed.get(pod.uid, pod) for pod in pods]
            yield from (self._adopt(pod) for pod in placed.values() if self._may(backoff.of_pod(pod.name)))
        found = members(group, pods, self.cluster.uid)
        desired = 0 if suspended else group.desired
        # As many Pods without a known replica as one replica has count as one: nothing is made twice.
        strangers = -(-len(found.strangers) // group.num_of_hosts)
        yield from self._end_strangers(group, found.strangers, desired)

        doomed = self._doomed(group, found, desired - strangers)
        for replica, why in doomed:
            yield from self._end(group, replica, why)
        ended = {replica.name for replica, _ in doomed}
        stay = [replica for replica in found.replicas if replica.name not in ended]
        yield from self._lost_pod_groups(group, stay)
        # It is being deleted: its place is kept for it, unless it is stuck.
        leaving = sum(replica.holds_its_place(self.now, self.undeletable) for replica, _ in doomed)
        held = self._held(group.name, found.indices)
        missing = desired - strangers - len(stay) - leaving - len(held)
        yield from self._create(group, found.indices | held, missing)

    def _end_strangers(
        self, group: GroupSpec, strangers: Sequence[PodView], desired: int
    ) -> Iterator[Action]:
        """Pods whose replica isn't known: they go if all Pods of their group go, or if they are named."""
        suspended = self.suspended or group.suspend
        for pod in strangers:
            if suspended or (desired == 0 and not self.cluster.autoscaling):
                yield from self._delete(pod, "suspended" if suspended else "no replicas are wanted")
            elif pod.name in group.workers_to_delete:
                yield from self._delete(pod, "it is in workersToDelete")

    def _doomed(self, group: GroupSpec, found: Members, room: int) -> list[tuple[Replica, str]]:
        """Replicas that have to go, or are going, and why."""
        doomed: list[tuple[Replica, str]] = []
        healthy: list[Replica] = []
        for replica in found.replicas:
            named = next((p.name for p in replica.pods if p.name in group.workers_to_delete), None)
            if not replica.whole:
                doomed.append((replica, replica.reason))
            elif self._waits_in_vain(group, replica):
                doomed.append((self._at_fault(replica, _HALF_BOUND), _HALF_BOUND))
            elif named is not None:
                doomed.append((replica, f"{named} is in workersToDelete"))
            else:
                healthy.append(replica)
        # Which ones go is the autoscaler's to say, where there is one.
        suspended = self.suspended or group.suspend
        surplus = len(healthy) - max(0, room)
        if surplus > 0 and (suspended or not self.cluster.autoscaling):
            healthy.sort(key=lambda replica: (replica.state is not ReplicaState.READY, replica.index))
            why = "suspended" if suspended else f"{room} replicas are wanted"
            doomed += [(replica, why) for replica in healthy[-surplus:]]
            del healthy[-surplus:]
        # What is stuck has been replaced, and mustn't hold up the others.
        busy = any(replica.holds_its_place(self.now, self.undeletable) for replica, _ in doomed)
        doomed += self._outdated(group, healthy, undisturbed=not busy and len(healthy) >= room)
        return doomed

    def _outdated(
        self, group: GroupSpec, healthy: Sequence[Replica], *, undisturbed: bool
    ) -> Iterator[tuple[Replica, str]]:
        """Replicas of another size or template. Those at work go some at a time, each time once the last ones
        have been replaced.
        """
        why = {replica.name: self._changed(group, replica) for replica in healthy}
        old = [replica for replica in healthy if why[replica.name]]
        at_work = [replica for replica in old if replica.state is ReplicaState.READY]
        idle = [replica for replica in old if replica.state is not ReplicaState.READY]
        if self.cluster.upgrade is not Upgrade.RECREATE:
            away = sum(replica.state is not ReplicaState.READY for replica in healthy) - len(idle)
            room = 0 if idle or not undisturbed else max(0, self.cluster.max_unavailable - away)
            at_work = at_work[:room]
        for replica in (*idle, *at_work):
            yield replica, why[replica.name]

    def _changed(self, group: GroupSpec, replica: Replica) -> str:
        if replica.hosts != group.num_of_hosts:
            return _size(replica, group)
        rolls = self.cluster.upgrade is not Upgrade.NONE
        if rolls and replica.template is not None and replica.template != group.fingerprint:
            return "its template has changed"
        return ""

    def _ahead_of_its_end(self, pod: PodView) -> str:
        """A head that works is only replaced where that costs no worker, or where it is asked for."""
        if pod.going and self.cluster.fault_tolerance is not None:
            return pod.going
        changed = pod.template is not None and pod.template != self.cluster.head.fingerprint
        return "its template has changed" if changed and self.cluster.upgrade is Upgrade.RECREATE else ""

    def _waits_in_vain(self, group: GroupSpec, replica: Replica) -> bool:
        """Half of it holds nodes that others could use, and no scheduler treats it as a gang."""
        if self.gang is not None or group.num_of_hosts == 1 or not replica.half_bound:
            return False
        until = max(pod.created for pod in replica.pods) + self.cluster.placement_timeout_s
        if self.now < until:
            self.wake.append(until)
        return self.now >= until

    def _at_fault(self, replica: Replica, why: str) -> Replica:
        return msgspec.structs.replace(replica, fault=why)

    def _end(self, group: GroupSpec, replica: Replica, why: str) -> Iterator[Action]:
        live = [pod for pod in replica.pods if pod.leaving is None]
        deletions = [action for pod in live for action in self._delete(pod, why)]
        if deletions:
            yield from self._remember(group.name, replica.index, replica.name, replica.fault)
            failure = self.failures.get((group.name, replica.index))
            if replica.fault and failure is not None and not self._is_due(failure):
                later = failure.retry_at - self.now
                why += f" (failure {failure.attempts} in a row; the next comes in {later:.0f} s)"
            what = f"replica {replica.index} of {group.name} ({replica.name})"
            broken = replica.state is ReplicaState.DEGRADED
            reason = "ReplicaReplaced" if broken else "ReplicaDeleted"
            yield Announce(broken, reason, f"{what} is deleted whole: {why}", replica.name, group.name)
        yield from deletions

    def _delete(self, pod: PodView, why: str) -> Iterator[Action]:
        if self._may(backoff.of_pod(pod.name)):
            yield DeletePod(pod.name, pod.uid, why)

    def _adopt(self, pod: PodView) -> Action:
        labels = {
            names.REPLICA_INDEX: str(pod.index),
            names.REPLICA_NAME: str(pod.replica),
            names.HOST_INDEX: str(pod.host),
        }
        return LabelPod(pod.name, pod.uid, labels, pod.hosts or 1)

    def _remember(self, group: str, index: int, replica: str, fault: str) -> Iterator[Action]:
        """That its containers have failed. Once: it may be reconciled again before it is gone."""
        before = self.failures.get((group, index))
        if not fault or (before is not None and before.replica == replica):
            return
        failure = self.failures[group, index] = ReplicaFailure(
            group=group,
            index=index,
            replica=replica,
            reason=fault,
            attempts=before.attempts + 1 if before else 1,
            at=self.now,
            generation=self.cluster.generation,
        )
        yield Remember(failure)

    def _held(self, group: str, used: Container[int]) -> frozenset[int]:
        """Indices whose replicas have failed again and again, and aren't tried anew yet."""
        held = set()
        for failure in self.failures.values():
            if failure.group == group and failure.index not in used and not self._is_due(failure):
                held.add(failure.index)
        return frozenset(held)

    def _create(self, group: GroupSpec, used: frozenset[int], missing: int) -> Iterator[Action]:
        """Those that were there before first: what their Pods have given back is theirs before anybody's."""
        count = max(0, missing)
        free = [index for index in range(len(used) + count) if index not in used][:count]
        healing = [index for index in free if (group.name, index) in self.seen.vacated]
        growing = [index for index in free if index not in healing]
        may_heal = [index for index in healing if self._may(backoff.of_replica(group.name, index))]
        may_grow = growing if growing and self._may(backoff.of_growth(group.name)) else []
        for index in (*may_heal, *may_grow)[:A_ROUND]:
            replica = self._name(group.name.lower(), f"{self.cluster.uid}/{group.name}/{index}/{self.now}")
            prefix = f"{self.cluster.name}-{group.name.lower()}-worker"
            made = tuple(self._name(prefix, f"{replica}/{host}") for host in range(group.num_of_hosts))
            yield CreateReplica(group.name, index, replica, made, heals=index in healing, gang=self.gang)

    def _may(self, what: str) -> bool:
        refusal = self.seen.refusals.get(what)
        return refusal is None or self._is_due(refusal)

    def _is_due(self, failed: ApiRefusal | ReplicaFailure) -> bool:
        if failed.generation != self.cluster.generation or self.now >= failed.retry_at:
            return True
        self.wake.append(failed.retry_at)
        return False

    def _name(self, prefix: str, seed: str) -> str:
        name = names.unique(prefix, seed, self.taken_names)
        self.taken_names.add(name)
        return name


def _size(replica: Replica, group: GroupSpec) -> str:
    return f"it has {replica.hosts} hosts, and numOfHosts is {group.num_of_hosts}"
