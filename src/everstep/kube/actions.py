"""What the operator can do, as values: ``reconcile`` decides on them, ``operator`` carries them out."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.kube import gangs, pods as build
from everstep.kube.backoff import ReplicaFailure, of_growth, of_replica
from everstep.kube.spec import ClusterSpec, GroupSpec, Manifest


class CreateService(msgspec.Struct, frozen=True):
    manifest: Manifest


class ChangeService(msgspec.Struct, frozen=True):
    """It is there, and isn't as it should be."""

    name: str
    change: Manifest


class CreateHead(msgspec.Struct, frozen=True):
    manifest: Manifest
    beside: tuple[Manifest, ...]
    """What it needs to be there first: the autoscaler's account and its rights."""


class CreateReplica(msgspec.Struct, frozen=True):
    """All of its Pods, or none."""

    group: str
    index: int
    name: str
    pods: tuple[str, ...]
    """Their names, by host. What they are like is made when its turn comes: a thousand replicas are a lot."""
    heals: bool = False
    """There was one in its place."""
    gang: gangs.Gang | None = None
    """The scheduler that treats its Pods as a gang, if there is one."""

    @property
    def refused_as(self) -> str:
        return of_replica(self.group, self.index) if self.heals else of_growth(self.group)

    def manifests(self, cluster: ClusterSpec) -> list[Manifest]:
        group = self._spec(cluster)
        return [
            build.worker_pod(cluster, group, pod, self.name, self.index, host, self.gang)
            for host, pod in enumerate(self.pods)
        ]

    def pod_group(self, cluster: ClusterSpec) -> Manifest | None:
        """What has to be there before its Pods."""
        if self.gang is None:
            return None
        return gangs.pod_group(cluster, self._spec(cluster), self.name, self.gang)

    def _spec(self, cluster: ClusterSpec) -> GroupSpec:
        return next(group for group in cluster.groups if group.name == self.group)


class CreatePodGroup(msgspec.Struct, frozen=True):
    """A replica's is gone, and the replica is not."""

    manifest: Manifest


class DeletePodGroup(msgspec.Struct, frozen=True):
    """Its replica is gone."""

    name: str
    uid: str
    api: str


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


class Announce(msgspec.Struct, frozen=True):
    """An event, for people."""

    warning: bool
    reason: str
    message: str
    about: str = ""
    """What it is about. The same reason about the same thing is one event that is counted up."""
    group: str = ""
    """The worker group that it is about, if it is."""


class Remember(msgspec.Struct, frozen=True):
    """A replica has failed: the next one may have to wait."""

    failure: ReplicaFailure


Action = (
    CreateService
    | ChangeService
    | CreateHead
    | CreateReplica
    | CreatePodGroup
    | DeletePodGroup
    | DeletePod
    | LabelPod
    | Remember
    | Announce
)


class Plan(msgspec.Struct, frozen=True):
    actions: tuple[Action, ...]
    wake_at: float | None
    """When to look again, though nothing should have changed."""
