"""A gang per slice: a replica of several hosts is scheduled as one or not at all. Pure.

KubeRay's gangs are whole clusters, so that a slice that is replaced waits for nothing, or for all. Here each
replica has a PodGroup of its own, at its place: the next replica there uses it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from everstep.kube import names
from everstep.kube.spec import Cluster, GroupSpec, Manifest

LABEL = "ray.io/scheduler-name"
"""KubeRay's, on a cluster: which scheduler its Pods are for."""
OFF = "everstep.dev/gang"
"""An annotation of a cluster: "off" has each Pod scheduled by itself."""


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler that knows gangs, and how it is told of one."""

    name: str
    api: str
    """The version of its PodGroups; where it isn't served, the scheduler isn't installed."""
    scheduler: str | None
    """Whom Pods have to be given to. None: the default scheduler honours it."""
    queue: str | None
    """The label that names a queue."""
    spec: Callable[[int, str | None], Manifest]
    mark: Callable[[str], tuple[dict[str, str], dict[str, str]]]
    """A Pod's labels and annotations."""


def _members(count: int, _: str | None) -> Manifest:
    return {"minMember": count}


def _queued(count: int, queue: str | None) -> Manifest:
    return {"minMember": count, **({"queue": queue} if queue else {})}


GANGS: tuple[Gang, ...] = (
    Gang(
        name="scheduler-plugins",
        api="scheduling.x-k8s.io/v1alpha1",
        scheduler=None,
        queue=None,
        spec=_members,
        mark=lambda group: ({"scheduling.x-k8s.io/pod-group": group}, {}),
    ),
    Gang(
        name="volcano",
        api="scheduling.volcano.sh/v1beta1",
        scheduler="volcano",
        queue="volcano.sh/queue-name",
        spec=_queued,
        mark=lambda group: ({}, {"scheduling.k8s.io/group-name": group}),
    ),
    Gang(
        name="kai-scheduler",
        api="scheduling.run.ai/v2alpha2",
        scheduler="kai-scheduler",
        queue="kai.scheduler/queue",
        spec=_queued,
        mark=lambda group: ({}, {"pod-group-name": group}),
    ),
)
QUEUES = tuple(gang.queue for gang in GANGS if gang.queue)


def choose(cluster: Cluster, served: frozenset[str]) -> Gang | None:
    """What is asked for by KubeRay's label or the templates' ``schedulerName``; else what is installed and
    needs no other scheduler. Pods are never given to another scheduler that nobody has asked for.
    """
    if cluster.annotations.get(OFF, "").lower() == "off":
        return None
    there = [gang for gang in GANGS if gang.api in served]
    asked = cluster.labels.get(LABEL)
    wanted = {group.template["spec"].get("schedulerName") for group in cluster.groups}
    for gang in there:
        if asked == gang.name or (asked is None and gang.scheduler is not None and gang.scheduler in wanted):
            return gang
    return next((gang for gang in there if gang.scheduler is None and asked is None), None)


def name_of(cluster: Cluster, group: GroupSpec, index: int) -> str:
    return f"{cluster.name}-{names.host_name(group.name, index, 0).rpartition('-')[0]}"


def pod_group(cluster: Cluster, group: GroupSpec, index: int, gang: Gang) -> Manifest:
    queue = cluster.labels.get(gang.queue) if gang.queue else None
    return {
        "apiVersion": gang.api,
        "kind": "PodGroup",
        "metadata": {
            "name": name_of(cluster, group, index),
            "namespace": cluster.namespace,
            "labels": {
                **names.labels(cluster.name, names.WORKER),
                names.WORKER_GROUP: group.name,
                **({gang.queue: queue} if gang.queue and queue else {}),
            },
            "ownerReferences": [cluster.as_owner],
        },
        "spec": gang.spec(group.num_of_hosts, queue),
    }


def join(cluster: Cluster, group: GroupSpec, index: int, gang: Gang, pod: Manifest) -> None:
    """Makes a Pod one of its replica's gang."""
    labels, annotations = gang.mark(name_of(cluster, group, index))
    pod["metadata"]["labels"].update(labels)
    pod["metadata"]["annotations"].update(annotations)
    if gang.queue and gang.queue in cluster.labels:
        pod["metadata"]["labels"].setdefault(gang.queue, cluster.labels[gang.queue])
    if gang.scheduler is not None:
        pod["spec"].setdefault("schedulerName", gang.scheduler)


def served(groups: Mapping[str, Any]) -> frozenset[str]:
    """The versions of APIs that a server has, from its list of groups."""
    return frozenset(
        version["groupVersion"] for group in groups.get("groups") or () for version in group["versions"]
    )
