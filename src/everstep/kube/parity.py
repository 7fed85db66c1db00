"""What is the same as in KubeRay 1.6, what is different and why, and what is refused: as a page of the docs.

The spec's fields are those of ``fields``; the rest is listed here, and tests hold it against what the
operator makes. ``python -m everstep.kube.parity docs/operator-parity.md`` writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from everstep.kube import fields, gangs, names
from everstep.kube.fields import Parity


class Row(msgspec.Struct, frozen=True):
    name: str
    verdict: Parity = Parity.SAME
    why: str = ""


_S, _D, _I = Parity.SAME, Parity.DIFFERENT, Parity.IGNORED
_OURS = "ours"
_SERVES = "only of RayServices, which aren't run"

STATUS = (
    Row("state", _S, "ready, suspended, failed, or none yet"),
    Row("stateTransitionTimes"),
    Row("reason", _D, "only of a spec that is refused; otherwise conditions tell"),
    Row("conditions", _D, "KubeRay's types and reasons, and ours beside them"),
    Row("desiredWorkerReplicas"),
    Row("minWorkerReplicas"),
    Row("maxWorkerReplicas"),
    Row("availableWorkerReplicas"),
    Row("readyWorkerReplicas"),
    Row("desiredCPU"),
    Row("desiredMemory"),
    Row("desiredGPU"),
    Row("desiredTPU"),
    Row("head", _S, "podName, podIP, serviceName, serviceIP"),
    Row("endpoints"),
    Row("observedGeneration"),
    Row("lastUpdateTime"),
    Row("slices", _D, f"{_OURS}: whole / desired replicas"),
    Row("groups", _D, f"{_OURS}: each group's replicas that aren't ready, and why"),
    Row("gang", _D, f"{_OURS}: who schedules slices as one"),
    Row("refused", _D, f"{_OURS}: what the API server refused, and how often"),
    Row("failing", _D, f"{_OURS}: replicas that fail again and again"),
)
CONDITIONS = (
    Row("HeadPodReady"),
    Row("RayClusterProvisioned"),
    Row("RayClusterSuspending"),
    Row("RayClusterSuspended"),
    Row("ReplicaFailure", _D, "reasons are QuotaExceeded, Refused and KeepsFailing; False instead of absent"),
    Row("Degraded", _D, f"{_OURS}: it was ready, and isn't whole"),
    Row("UnsupportedField", _D, f"{_OURS}: fields that nothing is done with"),
    Row("UnlabelledPods", _D, f"{_OURS}: Pods whose replica can't be told"),
    Row("OrphanedPods", _D, f"{_OURS}: Pods that no cluster owns"),
    Row("HeadOutdated", _D, f"{_OURS}: the autoscaler was turned on or off since the head was made"),
    Row("InvalidSpec", _D, f"{_OURS}: what is wrong with the spec, by field"),
)
LABELS = (
    Row(names.CLUSTER),
    Row(names.NODE_TYPE),
    Row(names.WORKER_GROUP),
    Row(names.IS_RAY_NODE),
    Row(names.IDENTIFIER),
    Row(names.APPLICATION),
    Row(names.CREATED_BY, _D, f"`{names.OPERATOR}`: who made it"),
    Row(names.REPLICA_INDEX, _D, "always, not by a feature gate"),
    Row(names.REPLICA_NAME, _D, "also of replicas of one host"),
    Row(names.HOST_INDEX, _D, "also of replicas of one host"),
    Row(names.LEGACY_REPLICA, _D, "as GKE's webhook for TPUs writes it"),
    Row("ray.io/serve", _I, _SERVES),
)
ANNOTATIONS = (
    Row(names.FT_ENABLED),
    Row(names.STORAGE_NAMESPACE),
    Row(names.HOSTS, _D, f"{_OURS}: how many hosts the replica was made with"),
    Row(names.TEMPLATE, _D, f"{_OURS}: which template it was made of"),
    Row(names.POD_GROUP, _D, f"{_OURS}: the PodGroup of its slice, where a scheduler reads those"),
    Row("ray.io/upgrade-strategy-recreate-hash", _I, f"`{names.TEMPLATE}` is in its place"),
    Row("ray.io/kuberay-version", _I, "it isn't KubeRay's"),
)
ENVIRONMENT = (
    Row("FQ_RAY_IP"),
    Row("RAY_IP"),
    Row("RAY_PORT"),
    Row("RAY_ADDRESS"),
    Row("RAY_CLUSTER_NAME"),
    Row("RAY_CLUSTER_NAMESPACE"),
    Row("RAY_CLOUD_INSTANCE_ID"),
    Row("RAY_NODE_TYPE_NAME"),
    Row("KUBERAY_GEN_RAY_START_CMD"),
    Row("RAY_USAGE_STATS_KUBERAY_IN_USE"),
    Row("RAY_USAGE_STATS_EXTRA_TAGS", _D, "`kuberay_version` names Everstep's"),
    Row("RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE"),
    Row("RAY_enable_autoscaler_v2"),
    Row("RAY_external_storage_namespace"),
    Row("RAY_REDIS_ADDRESS"),
    Row("REDIS_USERNAME"),
    Row("REDIS_PASSWORD"),
    Row("RAY_gcs_rpc_server_reconnect_timeout_s"),
    Row("RAY_AUTH_MODE"),
    Row("RAY_AUTH_TOKEN"),
    Row("TPU_WORKER_ID", _D, "KubeRay leaves it to GKE's webhook"),
    Row("TPU_WORKER_HOSTNAMES", _D, "KubeRay leaves it to GKE's webhook"),
    Row("TPU_NAME", _D, "KubeRay leaves it to GKE's webhook"),
    Row("RAY_timeout_ms_task_wait_for_death_info", _I, _SERVES),
    Row("RAY_gcs_server_request_timeout_seconds", _I, _SERVES),
    Row("RAY_SERVE_KV_TIMEOUT_S", _I, _SERVES),
)
PORTS = (
    Row("gcs-server", _D, "declared on the head's container, too, and moves with rayStartParams"),
    Row("dashboard", _D, "as gcs-server"),
    Row("client", _D, "as gcs-server"),
    Row("serve", _D, "as gcs-server"),
    Row("metrics", _D, "on every Pod, as in KubeRay; moves with rayStartParams"),
)
VOLUMES = (
    Row("shared-mem", _S, "a memory emptyDir at /dev/shm of the container's memory"),
    Row("ray-logs", _S, "at /tmp/ray, with the autoscaler"),
)
CONTAINERS = (
    Row("livenessProbe", _S, "httpGet of /api/healthz for rayVersion 2.53 and later, else wget"),
    Row("readinessProbe", _S, "as livenessProbe"),
    Row("wait-gcs-ready", _D, "connects to the head's port, every 2 s, without loading Ray"),
    Row("autoscaler", _D, "with `--gcs-address` where the head's port isn't 6379"),
    Row("lifecycle", _D, f"{_OURS}: workers tell Ray that they are about to leave"),
)
SERVICES = (
    Row("<cluster>-head-svc", _D, "selects the cluster and the node type only; is put right when it changes"),
    Row("<cluster>-headless", _S, "where a group has several hosts"),
    Row("<cluster>-serve-svc", _I, "RayServices aren't run"),
)
_REDIS_CLEANUP = ("CreatedRedisCleanupJob", "FailedToCreateRedisCleanupJob")
_INGRESS = ("CreatedIngress", "FailedToCreateIngress", "CreatedRoute", "FailedToCreateRoute")
EVENTS = (
    Row("ReplicaReplaced", _D, f"{_OURS}: a replica is replaced whole, and why"),
    Row("ReplicaDeleted", _D, f"{_OURS}: in place of KubeRay's DeletedWorkerPod, once a replica"),
    Row("HeadReplaced", _D, f"{_OURS}: in place of KubeRay's DeletedHeadPod"),
    Row("QuotaExceeded", _D, f"{_OURS}: in place of KubeRay's FailedToCreateWorkerPod"),
    Row("Refused", _D, f"{_OURS}: what the API server refused"),
    Row("RedisNotCleaned", _D, f"{_OURS}: where a deleted cluster's state is left"),
    Row("NotSupported", _D, f"{_OURS}: of RayJobs and RayServices, which nobody runs"),
    Row("CreatedHeadPod"),
    Row("CreatedWorkerPod", _D, "one for all Pods that a group gets at once, counted up"),
    Row("CreatedService"),
    Row("CreatedServiceAccount"),
    Row("CreatedRole"),
    Row("CreatedRoleBinding"),
    Row("CreatedSecret", _D, f"{_OURS}: the token of a cluster that wants one"),
    Row("InvalidRayClusterSpec"),
    Row("InvalidRayClusterMetadata", _D, "InvalidRayClusterSpec names the name, too"),
    Row("InvalidRayClusterStatus", _I, "what others write into the status is put right"),
    Row("DeletedHeadPod", _D, "HeadReplaced says why"),
    Row("DeletedWorkerPod", _D, "ReplicaDeleted and ReplicaReplaced say why"),
    Row("DeletedPod", _D, "as DeletedWorkerPod"),
    *(
        Row(f"FailedTo{what}", _D, "Refused or QuotaExceeded, counted up")
        for what in (
            "CreateHeadPod",
            "DeleteHeadPod",
            "CreateWorkerPod",
            "DeleteWorkerPod",
            "DeleteWorkerPodCollection",
            "DeletePod",
            "DeletePodCollection",
            "CreateService",
            "UpdateService",
            "CreateServiceAccount",
            "CreateRole",
            "CreateRoleBinding",
        )
    ),
    Row("UpdatedService", _I, "the operator's log tells"),
    Row("AutoscalerServiceAccountNotFound", _D, "Refused: the API server wants it, too"),
    *(Row(what, _I, "what is in Redis stays there") for what in _REDIS_CLEANUP),
    *(Row(what, _I, "no Ingress or Route is made") for what in _INGRESS),
)
ASKED = (
    Row(names.OVERWRITE_COMMAND, _S, "on a cluster or a template"),
    Row(names.FT_ENABLED),
    Row(names.STORAGE_NAMESPACE),
    Row(gangs.LABEL, _D, "a gang is a slice, not the cluster"),
    *(Row(queue) for queue in gangs.QUEUES),
    Row("kueue.x-k8s.io/queue-name", _S, "Kueue's, which suspends and resumes the cluster"),
    Row("yunikorn.apache.org/app-id", _I, "each slice is an application of its own"),
    Row("ray.io/gang-scheduling-enabled", _I, "gangs are on where a scheduler knows them"),
    Row("ray.io/enable-serve-service", _I, "RayServices aren't run"),
)
SECTIONS: dict[str, tuple[Row, ...]] = {
    "Annotations and labels of a cluster": ASKED,
    "Status": STATUS,
    "Conditions": CONDITIONS,
    "Labels of a Pod": LABELS,
    "Annotations of a Pod": ANNOTATIONS,
    "Variables of Ray's container": ENVIRONMENT,
    "Ports": PORTS,
    "Volumes": VOLUMES,
    "Containers and probes": CONTAINERS,
    "Services": SERVICES,
    "Events": EVENTS,
}


def page() -> str:
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# The operator beside KubeRay 1.6, field by field"
    yield ""
    yield "Made by `python -m everstep.kube.parity`; a test holds it against the code. *Same* means that it"
    yield "does what KubeRay does. *Ignored* fields are named in the condition `UnsupportedField`. A cluster"
    yield "with a *refused* field isn't run."
    yield ""
    yield "## Spec"
    yield ""
    spec = (Row(field.path, field.verdict, field.why) for field in fields.FIELDS)
    yield from _table(spec)
    for title, rows in SECTIONS.items():
        yield ""
        yield f"## {title}"
        yield ""
        yield from _table(rows)


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield "| | | |"
    yield "| --- | --- | --- |"
    for row in rows:
        yield f"| `{row.name}` | {row.verdict.value} | {row.why} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
