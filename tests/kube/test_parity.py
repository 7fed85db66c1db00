"""The page that says what is the same as in KubeRay, held against the code and KubeRay's own lists."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everstep.kube import conditions, gangs, parity, pods, services, status
from everstep.kube.fields import BY_PATH, Parity
from everstep.kube.reconcile import Observed
from everstep.kube.spec import ClusterSpec, parse
from everstep.kube.view import service_view
from kube.test_pods import environment, tpu_group
from kube.world import group, manifest

# What KubeRay 1.6's reference of the API lists.
KUBERAYS_SPEC = {
    "": "suspend managedBy autoscalerOptions headServiceAnnotations enableInTreeAutoscaling "
    "gcsFaultToleranceOptions headGroupSpec rayVersion workerGroupSpecs authOptions upgradeStrategy",
    "headGroupSpec": "template headService enableIngress resources labels rayStartParams serviceType",
    "workerGroupSpecs[]": "suspend groupName replicas minReplicas maxReplicas idleTimeoutSeconds resources "
    "labels rayStartParams template scaleStrategy numOfHosts",
    "workerGroupSpecs[].scaleStrategy": "workersToDelete",
    "autoscalerOptions": "resources image imagePullPolicy securityContext idleTimeoutSeconds upscalingMode "
    "version env envFrom volumeMounts",
    "gcsFaultToleranceOptions": "redisUsername redisPassword externalStorageNamespace redisAddress",
    "authOptions": "mode secretName enableK8sTokenAuth",
    "upgradeStrategy": "type",
}
KUBERAYS_STATUS = (
    "state desiredCPU desiredMemory desiredGPU desiredTPU lastUpdateTime stateTransitionTimes endpoints head "
    "reason conditions readyWorkerReplicas availableWorkerReplicas desiredWorkerReplicas minWorkerReplicas "
    "maxWorkerReplicas observedGeneration"
)

# And the constants of its code: what RayClusters have to do with.
KUBERAYS_LABELS = (
    "ray.io/cluster ray.io/node-type ray.io/group ray.io/is-ray-node ray.io/identifier ray.io/serve "
    "app.kubernetes.io/name app.kubernetes.io/created-by ray.io/worker-group-replica-index "
    "ray.io/worker-group-replica-name ray.io/replica-host-index"
)
KUBERAYS_ANNOTATIONS = (
    "ray.io/ft-enabled ray.io/external-storage-namespace ray.io/upgrade-strategy-recreate-hash "
    "ray.io/kuberay-version"
)
KUBERAYS_VARIABLES = (
    "RAY_CLUSTER_NAME RAY_CLUSTER_NAMESPACE RAY_IP FQ_RAY_IP RAY_PORT RAY_ADDRESS RAY_REDIS_ADDRESS "
    "REDIS_PASSWORD REDIS_USERNAME RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE RAY_external_storage_namespace "
    "RAY_gcs_rpc_server_reconnect_timeout_s RAY_timeout_ms_task_wait_for_death_info "
    "RAY_gcs_server_request_timeout_seconds RAY_SERVE_KV_TIMEOUT_S RAY_USAGE_STATS_KUBERAY_IN_USE "
    "RAY_USAGE_STATS_EXTRA_TAGS KUBERAY_GEN_RAY_START_CMD RAY_CLOUD_INSTANCE_ID RAY_NODE_TYPE_NAME "
    "RAY_enable_autoscaler_v2 RAY_AUTH_MODE RAY_AUTH_TOKEN"
)
KUBERAYS_PORTS = "client gcs-server dashboard metrics serve"
KUBERAYS_CONDITIONS = (
    "HeadPodReady RayClusterProvisioned RayClusterSuspending RayClusterSuspended ReplicaFailure"
)
KUBERAYS_EVENTS = (
    "InvalidRayClusterStatus InvalidRayClusterSpec InvalidRayClusterMetadata CreatedHeadPod "
    "FailedToCreateHeadPod DeletedHeadPod FailedToDeleteHeadPod CreatedWorkerPod FailedToCreateWorkerPod "
    "DeletedWorkerPod FailedToDeleteWorkerPod FailedToDeleteWorkerPodCollection CreatedRedisCleanupJob "
    "FailedToCreateRedisCleanupJob DeletedPod FailedToDeletePod FailedToDeletePodCollection CreatedIngress "
    "FailedToCreateIngress CreatedRoute FailedToCreateRoute CreatedService UpdatedService "
    "FailedToCreateService FailedToUpdateService CreatedServiceAccount FailedToCreateServiceAccount "
    "AutoscalerServiceAccountNotFound CreatedRole FailedToCreateRole CreatedRoleBinding "
    "FailedToCreateRoleBinding"
)


def full() -> ClusterSpec:
    """A cluster in which everything is turned on."""
    raw = manifest(
        tpu_group(),
        group("plain", 1, 1),
        enableInTreeAutoscaling=True,
        rayVersion="2.60.0",
        authOptions={"mode": "token"},
        gcsFaultToleranceOptions={
            "redisAddress": "redis:6379",
            "redisUsername": {"value": "me"},
            "redisPassword": {"value": "x"},
        },
    )
    return parse(raw)


def made() -> list[dict[str, Any]]:
    cluster = full()
    return [
        pods.head_pod(cluster, "a-head"),
        *(
            pods.worker_pod(cluster, one, "a-name", "tpu-xxxxx", 0, 0, gangs.GANGS[0])
            for one in cluster.groups
        ),
    ]


def names(rows: Iterable[parity.Row]) -> set[str]:
    return {row.name for row in rows}


def made_names(rows: Iterable[parity.Row]) -> set[str]:
    return {row.name for row in rows if row.verdict is not Parity.IGNORED}


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "operator-parity.md"
    assert page.read_text() == parity.page(), "python -m everstep.kube.parity docs/operator-parity.md"


def test_every_field_that_kuberay_has_is_listed() -> None:
    for parent, children in KUBERAYS_SPEC.items():
        for child in children.split():
            assert (f"{parent}.{child}" if parent else child) in BY_PATH
    assert set(KUBERAYS_STATUS.split()) <= names(parity.STATUS)


def test_whatever_kuberay_makes_is_listed() -> None:
    assert set(KUBERAYS_LABELS.split()) <= names(parity.LABELS)
    assert set(KUBERAYS_ANNOTATIONS.split()) <= names(parity.ANNOTATIONS)
    assert set(KUBERAYS_VARIABLES.split()) <= names(parity.ENVIRONMENT)
    assert set(KUBERAYS_PORTS.split()) <= names(parity.PORTS)
    assert set(KUBERAYS_CONDITIONS.split()) <= names(parity.CONDITIONS)
    assert set(KUBERAYS_EVENTS.split()) <= names(parity.EVENTS)


def test_whatever_differs_says_why() -> None:
    rows = [row for section in parity.SECTIONS.values() for row in section]
    for row in (*rows, *BY_PATH.values()):
        assert row.verdict is Parity.SAME or row.why, row


def test_what_pods_carry_is_what_is_listed() -> None:
    labels = {key for pod in made() for key in pod["metadata"]["labels"]}
    assert labels == made_names(parity.LABELS)
    assert {key for pod in made() for key in pod["metadata"]["annotations"]} == made_names(parity.ANNOTATIONS)
    variables = {name for pod in made() for name in environment(pod["spec"]["containers"][0])}
    assert variables == made_names(parity.ENVIRONMENT)
    ports = {port["name"] for pod in made() for port in pod["spec"]["containers"][0]["ports"]}
    assert ports == names(parity.PORTS)
    assert {v["name"] for pod in made() for v in pod["spec"].get("volumes") or ()} == names(parity.VOLUMES)
    containers = {
        name
        for pod in made()
        for name in (
            *(key for key in pod["spec"]["containers"][0] if key.endswith("Probe") or key == "lifecycle"),
            *(container["name"] for container in pod["spec"]["containers"][1:]),
            *(container["name"] for container in pod["spec"].get("initContainers") or ()),
        )
    }
    assert containers == names(parity.CONTAINERS)


def test_what_the_status_says_is_what_is_listed() -> None:
    cluster = full()
    there = {s["metadata"]["name"]: service_view(s) for s in services.wanted(cluster)}
    said = status.describe(cluster, Observed(pods=[], services=there), [], {}, 1000.0)
    assert set(said) <= names(parity.STATUS)
    assert set(conditions.KINDS) == names(parity.CONDITIONS)


def test_each_behaviour_has_a_verdict_a_reason_where_it_differs_and_a_test_that_is_there() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operator-behaviours.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if "`test_" in line]
    assert len(rows) > 35
    for behaviour, verdict, why, shown in ([cell.strip() for cell in row] for row in rows):
        assert Parity(verdict) is Parity.SAME or why, behaviour
        name, _, test = shown.strip("`").partition("::")
        assert f"\ndef {test}(" in (Path(__file__).parent / name).read_text(), shown
