"""What there is of a cluster, put together once for those who describe it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from everstep.kube import names
from everstep.kube.reconcile import Observed
from everstep.kube.replicas import Members, ReplicaState, adopted, members
from everstep.kube.spec import ClusterSpec
from everstep.kube.view import PodView


class ClusterFacts:
    def __init__(
        self,
        cluster: ClusterSpec,
        seen: Observed,
        unsupported: Sequence[str],
        before: Mapping[str, Any],
        now: float,
    ) -> None:
        self.cluster, self.seen, self.unsupported, self.before, self.now = (
            cluster,
            seen,
            unsupported,
            before,
            now,
        )
        self.pods = [pod for pod in seen.pods if pod.owner == cluster.uid]
        """The cluster's own, also those that are leaving."""

    @cached_property
    def head(self) -> PodView | None:
        heads = [pod for pod in self.pods if pod.node_type == names.HEAD and pod.leaving is None]
        return heads[0] if heads else None

    @property
    def head_ready(self) -> bool:
        return self.head is not None and self.head.ready

    @cached_property
    def workers(self) -> dict[str, list[PodView]]:
        """By group."""
        by_group: dict[str, list[PodView]] = {group.name: [] for group in self.cluster.groups}
        for pod in self.pods:
            if pod.node_type == names.WORKER and pod.group in by_group:
                by_group[pod.group].append(pod)
        return by_group

    @cached_property
    def members(self) -> dict[str, Members]:
        """By group, with those that are about to be taken in."""
        found = {}
        for group in self.cluster.groups:
            pods = self.workers[group.name]
            placed = {pod.uid: pod for pod in adopted(group, pods, self.cluster.uid)}
            pods = [placed.get(pod.uid, pod) for pod in pods]
            found[group.name] = members(group, pods, self.cluster.uid)
        return found

    def desired(self, group: str) -> int:
        """Replicas of it that there should be."""
        if self.cluster.suspend:
            return 0
        return next(spec.desired for spec in self.cluster.groups if spec.name == group)

    def ready(self, group: str) -> int:
        return sum(replica.state is ReplicaState.READY for replica in self.members[group].replicas)

    @property
    def all_ready(self) -> bool:
        if self.suspending or self.cluster.suspend:
            return False
        return self.head_ready and all(self.ready(name) >= self.desired(name) for name in self.members)

    @property
    def suspending(self) -> bool:
        """Once begun, it ends when all Pods are gone, even if the spec changes meanwhile."""
        return bool(self.pods) and (self.cluster.suspend or self.seen.suspending)

    @property
    def suspended(self) -> bool:
        return self.cluster.suspend and not self.pods

    def held(self, kind: str) -> bool:
        """Whether the condition held when the status was last written."""
        return holds(self.before, kind)

    def had(self, kind: str) -> bool:
        return any(c["type"] == kind for c in self.before.get("conditions") or ())


def holds(status: Mapping[str, Any], kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in status.get("conditions") or ())
