"""What there is, what there should be, and so what to do. Pure: no clock, no I/O, no memory.

Level-triggered: each call looks at everything anew. What it is shown are the Pods that the API server holds,
including those that the operator has just written and had acknowledged (``store`` sees to that).

The rules, for one worker group:

- A replica lives and dies as one. A Pod of it that is broken, missing or on its way out takes the others
along.
- Its place is kept while its Pods are leaving, and is filled anew once they are gone. Pods that won't leave
keep
  their index, and nothing else: the replacement takes another one.
- Replicas are made whole, at the lowest free indices.
- A healthy replica is only touched because somebody asked: fewer replicas, ``workersToDelete``, suspension,
another
  ``numOfHosts`` (one replica at a time).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from everstep.kube import names, pods as build
from everstep.kube.replicas import PATIENCE_S, Members, Replica, State, adopted, is_stuck, members
from everstep.kube.spec import Cluster, GroupSpec, Manifest
from everstep.kube.view import PodView

FIRST_RETRY_S = 30.0
LAST_RETRY_S = 300.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The API server wouldn't have the Pods of a group. The cluster's status remembers it."""

    reason: str
    message: str
    attempts: int
    at: float
    generation: int
    """Of the cluster's spec: a change is a reason to try at once."""

    @property
    def retry_at(self) -> float:
        return self.at + min(FIRST_RETRY_S * 2.0 ** (self.attempts - 1), LAST_RETRY_S)


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    pods: Sequence[PodView]
    services: frozenset[str] = frozenset()
    refusals: Mapping[str, Refusal] = {}


class CreateService(msgspec.Struct, frozen=True):
    manifest: Manifest


class CreateHead(msgspec.Struct, frozen=True):
    manifest: Manifest
    beside: tuple[Manifest, ...]
    """What it needs to be there first: the autoscaler's account and its rights."""


class CreateReplica(msgspec.Struct, frozen=True):
    """All of its Pods, or none."""

    group: str
    index: int
    name: str
    pods: tuple[Manifest, ...]


class DeletePod(msgspec.Struct, frozen=True):
    name: str
    uid: str
    reason: str


class LabelPod(msgspec.Struct, frozen=True):
    """Takes a Pod in that had no labels of its replica."""

    name: str
    uid: str
    labels: Mapping[str, str]
    hosts: int


class Tell(msgspec.Struct, frozen=True):
    """An event, for people."""

    warning: bool
    reason: str
    message: str


Action = CreateService | CreateHead | CreateReplica | DeletePod | LabelPod | Tell


class Plan(msgspec.Struct, frozen=True):
    actions: tuple[Action, ...]
    wake_at: float | None
    """When to look again, though nothing should have changed."""


def reconcile(cluster: Cluster, seen: Observed, now: float) -> Plan:
    return _Reconciliation(cluster, seen, now).plan()


class _Reconciliation:
    def __init__(self, cluster: Cluster, seen: Observed, now: float) -> None:
        self.cluster = cluster
        self.seen = seen
        self.now = now
        self.wake: list[float] = []
        self.taken_names = {pod.name for pod in seen.pods} | {pod.replica for pod in seen.pods if pod.replica}
        self.taken_names.update(name for group in cluster.groups for name in group.workers_to_delete)

    def plan(self) -> Plan:
        actions = [*self._services(), *self._head()]
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
        wanted = [build.head_service(self.cluster)]
        if self.cluster.needs_headless_service:
            wanted.append(build.headless_service(self.cluster))
        for service in wanted:
            if service["metadata"]["name"] not in self.seen.services:
                yield CreateService(service)

    def _head(self) -> Iterator[Action]:
        heads = [p for p in self.seen.pods if p.node_type == names.HEAD and p.owner == self.cluster.uid]
        live = sorted((p for p in heads if p.leaving is None), key=lambda p: (p.created, p.name))
        if self.cluster.suspend:
            yield from (DeletePod(pod.name, pod.uid, "the cluster is suspended") for pod in live)
            return
        for pod in live:
            if pod.broken or pod.node_lost:
                yield Tell(True, "HeadReplaced", f"head {pod.name}: {pod.broken or 'its node is lost'}")
                yield DeletePod(pod.name, pod.uid, pod.broken or "its node is lost")
            elif pod is not live[0]:
                yield DeletePod(pod.name, pod.uid, f"{live[0].name} is the head already")
        # Two heads would be two clusters under one name: the next waits for the last, unless that is stuck.
        if not live and all(is_stuck(pod, self.now) for pod in heads):
            refusal = self.seen.refusals.get(names.HEAD_GROUP)
            if self._may_create(refusal):
                name = self._name(f"{self.cluster.name}-head", f"{self.cluster.uid}/head/{self.now}")
                yield CreateHead(build.head_pod(self.cluster, name), build.beside_head(self.cluster))

    def _of_no_group(self, pods: Sequence[PodView]) -> Iterator[Action]:
        for pod in pods:
            if pod.leaving is None and pod.owner == self.cluster.uid:
                yield DeletePod(pod.name, pod.uid, f"the cluster has no group {pod.group!r}")

    def _group(self, group: GroupSpec, pods: Sequence[PodView]) -> Iterator[Action]:
        suspended = self.cluster.suspend or group.suspend
        if not suspended:
            placed = {pod.uid: pod for pod in adopted(group, pods, self.cluster.uid)}
            pods = [placed.get(pod.uid, pod) for pod in pods]
            yield from (self._adopt(pod) for pod in placed.values())
        found = members(group, pods, self.cluster.uid)
        desired = 0 if suspended else group.desired
        # Each replica's worth of Pods that can't be told apart stands for one: nothing is made twice.
        strangers = -(-len(found.strangers) // group.num_of_hosts)
        if suspended:
            yield from (DeletePod(pod.name, pod.uid, "suspended") for pod in found.strangers)

        doomed = self._doomed(group, found, desired - strangers)
        for replica, why in doomed:
            yield from self._end(group, replica, why)
        ended = {replica.name for replica, _ in doomed}
        kept = sum(replica.name not in ended for replica in found.replicas)
        # Just told to leave, or leaving still: its place is kept for it, unless it is stuck.
        leaving = sum(replica.holds_its_place(self.now) for replica, _ in doomed)
        missing = desired - strangers - kept - leaving
        if missing > 0 and self._may_create(self.seen.refusals.get(group.name)):
            yield from self._create(group, found, missing)

    def _doomed(self, group: GroupSpec, found: Members, room: int) -> list[tuple[Replica, str]]:
        """Replicas that have to go, or are going, and why."""
        doomed: list[tuple[Replica, str]] = []
        healthy: list[Replica] = []
        for replica in found.replicas:
            named = next((p.name for p in replica.pods if p.name in group.workers_to_delete), None)
            if not replica.whole:
                doomed.append((replica, replica.reason))
            elif named is not None:
                doomed.append((replica, f"{named} is in workersToDelete"))
            else:
                healthy.append(replica)
        # Which ones go is the autoscaler's to say, where there is one.
        suspended = self.cluster.suspend or group.suspend
        surplus = len(healthy) - max(0, room)
        if surplus > 0 and (suspended or not self.cluster.autoscaling):
            healthy.sort(key=lambda replica: (replica.state is not State.READY, replica.index))
            why = "suspended" if suspended else f"{room} replicas are wanted"
            doomed += [(replica, why) for replica in healthy[-surplus:]]
            del healthy[-surplus:]
        # What is stuck has been replaced, and mustn't hold up the others.
        busy = any(replica.holds_its_place(self.now) for replica, _ in doomed)
        doomed += self._outdated(group, healthy, undisturbed=not busy and len(healthy) >= room)
        return doomed

    def _outdated(
        self, group: GroupSpec, healthy: Sequence[Replica], *, undisturbed: bool
    ) -> Iterator[tuple[Replica, str]]:
        """Replicas of another size. Those at work go one at a time, each once the last has been replaced."""
        old = [replica for replica in healthy if replica.hosts != group.num_of_hosts]
        at_work = [replica for replica in old if replica.state is State.READY]
        for replica in old:
            if replica.state is not State.READY:
                yield replica, _size(replica, group)
                undisturbed = False
        if at_work and undisturbed and all(replica.state is State.READY for replica in healthy):
            yield at_work[0], _size(at_work[0], group)

    def _end(self, group: GroupSpec, replica: Replica, why: str) -> Iterator[Action]:
        live = [pod for pod in replica.pods if pod.leaving is None]
        if live:
            what = f"replica {replica.index} of {group.name} ({replica.name})"
            broken = replica.state is State.DEGRADED
            yield Tell(
                broken, "ReplicaReplaced" if broken else "ReplicaDeleted", f"{what} is deleted whole: {why}"
            )
        for pod in live:
            yield DeletePod(pod.name, pod.uid, why)

    def _adopt(self, pod: PodView) -> Action:
        labels = {
            names.REPLICA_INDEX: str(pod.index),
            names.REPLICA_NAME: str(pod.replica),
            names.HOST_INDEX: str(pod.host),
        }
        return LabelPod(pod.name, pod.uid, labels, pod.hosts or 1)

    def _create(self, group: GroupSpec, found: Members, count: int) -> Iterator[Action]:
        highest = len(found.indices) + count
        free = (index for index in range(highest) if index not in found.indices)
        for _ in range(count):
            index = next(free)
            replica = self._name(group.name, f"{self.cluster.uid}/{group.name}/{index}/{self.now}")
            prefix = f"{self.cluster.name}-{group.name}-worker"
            made = tuple(
                build.worker_pod(
                    self.cluster, group, self._name(prefix, f"{replica}/{host}"), replica, index, host
                )
                for host in range(group.num_of_hosts)
            )
            yield CreateReplica(group.name, index, replica, made)

    def _may_create(self, refusal: Refusal | None) -> bool:
        if refusal is None or refusal.generation != self.cluster.generation or self.now >= refusal.retry_at:
            return True
        self.wake.append(refusal.retry_at)
        return False

    def _name(self, prefix: str, seed: str) -> str:
        name = names.unique(prefix, seed, self.taken_names)
        self.taken_names.add(name)
        return name


def _size(replica: Replica, group: GroupSpec) -> str:
    return f"it has {replica.hosts} hosts, and numOfHosts is {group.num_of_hosts}"
