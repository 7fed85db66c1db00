"""Pods put together into replicas, and how each is doing. Facts only: what to do is ``reconcile``'s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from enum import Enum

import msgspec

from everstep.kube import names
from everstep.kube.spec import GroupSpec, RestartPolicy
from everstep.kube.view import PodView

PATIENCE_S = 15.0
"""How long past its grace period a deleted Pod still counts as leaving. Then it is stuck."""


class ReplicaState(Enum):
    """A replica's life."""

    PENDING = "Pending"
    CREATING = "Creating"
    READY = "Ready"
    DEGRADED = "Degraded"
    REPLACING = "Replacing"


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    index: int
    hosts: int
    """How many it was made with."""
    pods: tuple[PodView, ...]
    state: ReplicaState
    reason: str = ""
    fault: str = ""
    """What its own containers did, where that is why it is no longer whole: it may well happen again."""
    template: str | None = None
    """Which template its Pods were made of, if they say."""

    @property
    def whole(self) -> bool:
        """All of its hosts are there, and none is broken or leaving."""
        return self.state in (ReplicaState.PENDING, ReplicaState.CREATING, ReplicaState.READY)

    @property
    def half_bound(self) -> bool:
        """Some of its hosts have a node, and others wait for one."""
        bound = sum(pod.scheduled for pod in self.pods)
        return self.state is ReplicaState.PENDING and 0 < bound < len(self.pods)

    def holds_its_place(self, now: float, undeletable: Container[str]) -> bool:
        """Whether its Pods, on their way out, will be gone soon enough to be waited for."""
        return any(not is_stuck(pod, now) and pod.name not in undeletable for pod in self.pods)


class Members(msgspec.Struct, frozen=True):
    """The Pods of one worker group."""

    replicas: tuple[Replica, ...]
    strangers: tuple[PodView, ...]
    """Live Pods that don't say which replica they are of."""
    indices: frozenset[int]
    """Indices that some Pod still has, also one that is leaving."""


def is_stuck(pod: PodView, now: float) -> bool:
    """Deleted, and still there: its grace period is over, or its kubelet is gone."""
    return pod.leaving is not None and (pod.node_lost or now > pod.leaving + PATIENCE_S)


def members(group: GroupSpec, pods: Iterable[PodView], owner: str) -> Members:
    by_replica: dict[tuple[str, int], list[PodView]] = {}
    strangers: list[PodView] = []
    indices: set[int] = set()
    for pod in pods:
        if pod.index is not None:
            indices.add(pod.index)
        if pod.owner != owner:
            continue  # of an earlier cluster of this name, and being collected
        if pod.replica is not None and pod.index is not None and pod.host is not None:
            by_replica.setdefault((pod.replica, pod.index), []).append(pod)
        elif pod.leaving is None:
            strangers.append(pod)
    replicas = [_replica(group, name, index, found) for (name, index), found in by_replica.items()]
    replicas.sort(key=lambda replica: (replica.index, replica.name))
    return Members(tuple(replicas), tuple(strangers), frozenset(indices))


def _replica(group: GroupSpec, name: str, index: int, pods: list[PodView]) -> Replica:
    pods.sort(key=lambda pod: (pod.host or 0, pod.created, pod.name))
    hosts = next((pod.hosts for pod in pods if pod.hosts), group.num_of_hosts)
    state, reason = _state(group, hosts, pods)
    fault = next((why for pod in pods if (why := _fault(group, hosts, pod))), "")
    return Replica(
        name=name,
        index=index,
        hosts=hosts,
        pods=tuple(pods),
        state=state,
        reason=reason,
        fault=fault,
        template=next((pod.template for pod in pods if pod.template), None),
    )


def _state(group: GroupSpec, hosts: int, pods: Sequence[PodView]) -> tuple[ReplicaState, str]:
    leaving = [pod for pod in pods if pod.leaving is not None]
    if len(leaving) == len(pods):
        return ReplicaState.REPLACING, f"waiting for {_list(pod.name for pod in leaving)} to be gone"
    if leaving:
        return ReplicaState.DEGRADED, f"{_list(pod.name for pod in leaving)} is being deleted"
    for pod in pods:
        why = "its node is lost" if pod.node_lost else pod.going or _fault(group, hosts, pod)
        if why:
            return ReplicaState.DEGRADED, f"{pod.name}: {why}"
    present = [pod.host for pod in pods]
    if present != list(range(hosts)):
        missing = sorted(set(range(hosts)) - set(present))
        if missing:
            return ReplicaState.DEGRADED, f"host {_list(str(host) for host in missing)} of {hosts} is missing"
        return ReplicaState.DEGRADED, f"more Pods than its {hosts} hosts: {_list(pod.name for pod in pods)}"
    if all(pod.ready for pod in pods):
        return ReplicaState.READY, ""
    waiting = next(pod for pod in pods if not pod.ready)
    unscheduled = next((pod for pod in pods if not pod.scheduled), None)
    if unscheduled is not None:
        return ReplicaState.PENDING, f"{unscheduled.name}: {unscheduled.waiting_for or 'not on a node yet'}"
    return ReplicaState.CREATING, f"{waiting.name}: {waiting.waiting_for or 'not ready yet'}"


def _fault(group: GroupSpec, hosts: int, pod: PodView) -> str:
    if pod.broken and not pod.node_lost:
        return pod.broken
    if pod.restarts and hosts > 1 and group.restart is RestartPolicy.REPLICA:
        return "its container was started again, and is no longer in step with the other hosts"
    return ""


def adopted(group: GroupSpec, pods: Sequence[PodView], owner: str) -> list[PodView]:
    """Pods without labels of their replica, as they will be with them, where the replica is known.

    A Pod alone is a replica of one host, at the index that it has, if it has one (KubeRay gives such Pods an
    index and nothing else). Hosts of a larger one are known by what GKE's webhook wrote on them,
    and only if all of them are there.
    """
    ours = [pod for pod in pods if pod.owner == owner and pod.leaving is None]
    if all(is_labelled(pod) for pod in ours):
        return []
    taken = {pod.index for pod in pods if pod.index is not None}
    if group.num_of_hosts == 1:
        free = (index for index in range(len(pods) + len(taken) + 1) if index not in taken)
        lone = sorted((pod for pod in ours if not is_labelled(pod)), key=lambda pod: (pod.created, pod.name))
        holders = Counter(pod.index for pod in pods)
        return [
            _placed(group, pod, pod.uid, index, 0)
            for pod in lone
            for index in [pod.index if pod.index is not None and holders[pod.index] == 1 else next(free)]
        ]
    hinted: dict[str, list[PodView]] = {}
    for pod in ours:
        if pod.hint is not None:
            hinted.setdefault(pod.hint[0], []).append(pod)
    found = []
    for key, slice_ in sorted(hinted.items()):
        index = key.removeprefix(f"{group.name}-")
        hosts = sorted(pod.hint[1] for pod in slice_ if pod.hint is not None)
        if not index.isdigit() or hosts != list(range(group.num_of_hosts)):
            continue
        # The hosts' names have the index in them, so it must be that one.
        placed = [
            _placed(group, pod, f"{owner}/{key}", int(index), pod.hint[1]) for pod in slice_ if pod.hint
        ]
        others = any(pod.index == int(index) and pod.replica != placed[0].replica for pod in pods)
        if not others:
            found += [after for before, after in zip(slice_, placed, strict=True) if not is_labelled(before)]
    return found


def is_labelled(pod: PodView) -> bool:
    return pod.replica is not None and pod.index is not None and pod.host is not None


def _placed(group: GroupSpec, pod: PodView, seed: str, index: int, host: int) -> PodView:
    name = names.unique(group.name.lower(), seed, ())
    return msgspec.structs.replace(pod, replica=name, index=index, host=host, hosts=group.num_of_hosts)


def _list(items: Iterable[str]) -> str:
    listed = list(items)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
