"""A gang per slice: a replica of several hosts is scheduled as one or not at all. Pure.

KubeRay's gangs are whole clusters, so that a slice that is replaced waits for nothing, or for all. Here each
replica has a PodGroup of its own, which goes when it does. Its successor gets another one: schedulers
remember what became of a gang, and YuniKorn schedules an application as one only when it begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import msgspec

from everstep.kube import names, quantities
from everstep.kube.spec import ClusterSpec, GroupSpec, Manifest

LABEL = "ray.io/scheduler-name"
"""KubeRay's, on a cluster: which scheduler its Pods are for."""
OFF = "everstep.dev/gang"
"""An annotation of a cluster: "off" has each Pod scheduled by itself."""


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler that knows gangs, and how Pods are marked as one for it."""

    name: str
    api: str | None
    """The version of its PodGroups; where it isn't served, the scheduler isn't installed. None: it has none,
    and is used where it is asked for.
    """
    scheduler: str | None
    """Whom Pods have to be given to. None: the default scheduler honours it."""
    queue: str | None = None
    """The label of a cluster that names a queue."""
    spec: Callable[[GroupSpec, str | None], Manifest] | None = None
    """Of a replica's PodGroup, given its group and queue. None: the scheduler makes PodGroups itself, or has
    none.
    """
    mark: Callable[[Manifest, str, GroupSpec], None] = lambda pod, gang, group: None
    """Makes a Pod one of the gang of that name."""


def _members(group: GroupSpec, _: str | None) -> Manifest:
    """With what all of its hosts ask for: a gang that can't fit isn't tried host by host."""
    least = {
        name: quantities.text(amount * group.num_of_hosts, binary=name == "memory")
        for name, amount in _asked(group).items()
    }
    return {"minMember": group.num_of_hosts, **({"minResources": least} if least else {})}


def _queued(group: GroupSpec, queue: str | None) -> Manifest:
    return {**_members(group, None), **({"queue": queue} if queue else {})}


def _native(group: GroupSpec, _: str | None) -> Manifest:
    return {"schedulingPolicy": {"gang": {"minCount": group.num_of_hosts}}}


def _asked(group: GroupSpec) -> dict[str, Decimal]:
    """By each host."""
    asked: dict[str, Decimal] = {}
    for container in group.template["spec"]["containers"]:
        for name, amount in quantities.requested(container).items():
            asked[name] = asked.get(name, Decimal(0)) + quantities.number(amount)
    return asked


def _labelled(key: str) -> Callable[[Manifest, str, GroupSpec], None]:
    return lambda pod, gang, _: pod["metadata"]["labels"].update({key: gang})


def _annotated(key: str) -> Callable[[Manifest, str, GroupSpec], None]:
    return lambda pod, gang, _: pod["metadata"]["annotations"].update({key: gang})


def _grouped(pod: Manifest, gang: str, _: GroupSpec) -> None:
    pod["spec"]["schedulingGroup"] = {"podGroupName": gang}


def _as_application(pod: Manifest, gang: str, group: GroupSpec) -> None:
    """YuniKorn has no PodGroups: an application says which tasks it has to have at least."""
    least = {name: quantities.text(amount) for name, amount in _asked(group).items()}
    task = {"name": gang, "minMember": group.num_of_hosts, "minResource": least}
    pod["metadata"]["labels"]["applicationId"] = gang
    pod["metadata"]["annotations"].update(
        {
            "yunikorn.apache.org/task-group-name": gang,
            "yunikorn.apache.org/task-groups": json.dumps([task], sort_keys=True),
        }
    )


def _of_kubernetes(version: str) -> Gang:
    """Its own is young: each release has another version, and none has changed what is used here."""
    api = f"scheduling.k8s.io/{version}"
    return Gang(name="kubernetes", api=api, scheduler=None, spec=_native, mark=_grouped)


GANGS: tuple[Gang, ...] = (
    _of_kubernetes("v1alpha3"),
    _of_kubernetes("v1alpha2"),
    Gang(
        name="scheduler-plugins",
        api="scheduling.x-k8s.io/v1alpha1",
        scheduler=None,
        spec=_members,
        mark=_labelled("scheduling.x-k8s.io/pod-group"),
    ),
    Gang(
        name="volcano",
        api="scheduling.volcano.sh/v1beta1",
        scheduler="volcano",
        queue="volcano.sh/queue-name",
        spec=_queued,
        mark=_annotated("scheduling.k8s.io/group-name"),
    ),
    Gang(
        name="kai-scheduler",
        api="scheduling.run.ai/v2alpha2",
        scheduler="kai-scheduler",
        queue="kai.scheduler/queue",
        # Its pod-grouper makes groups of its own for the Pods of a RayCluster, and ignores their labels.
    ),
    Gang(
        name="yunikorn",
        api=None,
        scheduler="yunikorn",
        queue="yunikorn.apache.org/queue",
        mark=_as_application,
    ),
)
QUEUES = tuple(gang.queue for gang in GANGS if gang.queue)
_QUEUE_OF_PODS = {"yunikorn.apache.org/queue": "queue"}
"""Where a Pod's label has another name than the cluster's."""


def choose(cluster: ClusterSpec, served: frozenset[str]) -> Gang | None:
    """What is asked for by KubeRay's label or the templates' ``schedulerName``; else what is installed and
    needs no other scheduler. Pods are never given to a scheduler that the user hasn't chosen.
    """
    if cluster.annotations.get(OFF, "").lower() == "off":
        return None
    there = [gang for gang in GANGS if gang.api is None or gang.api in served]
    asked = cluster.labels.get(LABEL)
    wanted = {group.template["spec"].get("schedulerName") for group in cluster.groups}
    for gang in there:
        if asked == gang.name or (asked is None and gang.scheduler is not None and gang.scheduler in wanted):
            return gang
    return next((gang for gang in there if gang.scheduler is None and asked is None), None)


def pod_group(cluster: ClusterSpec, group: GroupSpec, replica: str, gang: Gang) -> Manifest | None:
    if gang.api is None or gang.spec is None or group.num_of_hosts == 1:
        return None
    queue = cluster.labels.get(gang.queue) if gang.queue else None
    return {
        "apiVersion": gang.api,
        "kind": "PodGroup",
        "metadata": {
            "name": names.pod_group(cluster.name, replica),
            "namespace": cluster.namespace,
            "labels": {
                **names.labels(cluster.name, names.WORKER),
                names.WORKER_GROUP: group.name,
                names.REPLICA_NAME: replica,
                **({gang.queue: queue} if gang.queue and queue else {}),
            },
            "ownerReferences": [cluster.as_owner],
        },
        "spec": gang.spec(group, queue),
    }


def join(cluster: ClusterSpec, group: GroupSpec, replica: str, gang: Gang, pod: Manifest) -> None:
    """Makes a Pod one of its replica's gang."""
    name = names.pod_group(cluster.name, replica)
    gang.mark(pod, name, group)
    if gang.spec is not None:
        pod["metadata"]["annotations"][names.POD_GROUP] = name
    if gang.queue and gang.queue in cluster.labels:
        label = _QUEUE_OF_PODS.get(gang.queue, gang.queue)
        pod["metadata"]["labels"].setdefault(label, cluster.labels[gang.queue])
    if gang.scheduler is not None:
        pod["spec"].setdefault("schedulerName", gang.scheduler)


class PodGroupView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uid: str
    version: int
    owner: str | None
    """The uid of the RayCluster that it belongs to."""
    replica: str
    api: str


PodGroups = Mapping[str, PodGroupView]
"""By name."""


def served(groups: Mapping[str, Any]) -> frozenset[str]:
    """The versions of APIs that a server has, from its list of groups."""
    return frozenset(
        version["groupVersion"] for group in groups.get("groups") or () for version in group["versions"]
    )
