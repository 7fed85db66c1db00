"""Keys and names that Pods, Services and people know each other by. KubeRay's where it has one."""

from __future__ import annotations

import hashlib
from collections.abc import Container

GROUP = "ray.io"
VERSION = "v1"
PLURAL = "rayclusters"
KIND = "RayCluster"

CLUSTER = "ray.io/cluster"
NODE_TYPE = "ray.io/node-type"
WORKER_GROUP = "ray.io/group"
IS_RAY_NODE = "ray.io/is-ray-node"
IDENTIFIER = "ray.io/identifier"
REPLICA_INDEX = "ray.io/worker-group-replica-index"
REPLICA_NAME = "ray.io/worker-group-replica-name"
HOST_INDEX = "ray.io/replica-host-index"
CREATED_BY = "app.kubernetes.io/created-by"
APPLICATION = "app.kubernetes.io/name"
HEADLESS = "ray.io/headless-worker-svc"
LEGACY_REPLICA = "replicaIndex"
"""What GKE's webhook wrote before KubeRay had labels of its own: ``<group>-<index>``."""

MANAGED = "everstep.dev/managed"
HOSTS = "everstep.dev/num-of-hosts"
"""How many hosts a replica was made with; the spec may have changed since."""
TEMPLATE = "everstep.dev/template"
"""A fingerprint of the template that a Pod was made of."""
MAX_UNAVAILABLE = "everstep.dev/max-unavailable"
"""An annotation of a cluster: how many replicas of a group are replaced at once when a template changes."""
PLACEMENT_TIMEOUT = "everstep.dev/placement-timeout-seconds"
"""An annotation of a cluster: how long some hosts of a replica may hold nodes while the others wait."""
RESTART_POLICY = "everstep.dev/restart-policy"
POD_GROUP = "everstep.dev/pod-group"
"""The PodGroup that a Pod was made one of, whichever scheduler's."""
SLICE = "everstep.dev/slice"
"""A Ray node label: the slice that the node belongs to, for any accelerator."""
SLICE_HOST = "everstep.dev/slice-host"

FT_ENABLED = "ray.io/ft-enabled"
STORAGE_NAMESPACE = "ray.io/external-storage-namespace"
REDIS_FINALIZER = "ray.io/gcs-ft-redis-cleanup-finalizer"
OVERWRITE_COMMAND = "ray.io/overwrite-container-cmd"
AUTOSCALER = "autoscaler"
"""The head's sidecar."""
HEAD = "head"
WORKER = "worker"
HEAD_GROUP = "headgroup"
OPERATOR = "everstep-operator"
MANAGED_BY_US = "everstep.dev/operator"
MANAGED_BY_KUBERAY = "ray.io/kuberay-operator"
MANAGED_BY_KUEUE = "kueue.x-k8s.io/multikueue"
KUEUE_SLICE_SIZE = "kueue.x-k8s.io/podset-slice-size"
"""An annotation of a template: how many of its Pods share a topology domain."""

TPU_RESOURCE = "google.com/tpu"
TPU_TOPOLOGY_SELECTOR = "cloud.google.com/gke-tpu-topology"
TPU_ACCELERATOR_SELECTOR = "cloud.google.com/gke-tpu-accelerator"

MOST_HOSTS = 10_000
"""Of one replica. The largest slices have some thousands."""

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # Kubernetes' own for generated names: no vowels, no lookalikes
_LONGEST = 63


def head_service(cluster: str) -> str:
    return f"{cluster}-head-svc"


def headless_service(cluster: str) -> str:
    return f"{cluster}-headless"


def labels(cluster: str, node_type: str) -> dict[str, str]:
    """What all that the operator makes for a cluster carries. KubeRay's, but for who made it."""
    return {
        CLUSTER: cluster,
        NODE_TYPE: node_type,
        IDENTIFIER: f"{cluster}-{node_type}",
        APPLICATION: "kuberay",
        CREATED_BY: OPERATOR,
    }


def slice_name(group: str, index: int) -> str:
    return f"{group}-{index}"


def host_name(group: str, index: int, host: int) -> str:
    """Host names have no capitals; groups may."""
    return f"{group.lower()}-{index}-{host}"


def host_names(cluster: str, group: str, index: int, hosts: int) -> list[str]:
    """Stable names of a replica's hosts, as they resolve inside the namespace."""
    return [f"{host_name(group, index, host)}.{headless_service(cluster)}" for host in range(hosts)]


def pod_group(cluster: str, replica: str) -> str:
    """Of one replica, and never of another. It is also a label's value, which can't be long."""
    name = f"{cluster}-{replica}"
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 17].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def unique(prefix: str, seed: str, taken: Container[str]) -> str:
    """``prefix-xxxxx``, the same for the same seed, and none of those that are taken."""
    salt = 0
    while True:
        digest = hashlib.sha256(f"{seed}\0{salt}".encode()).digest()
        suffix = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:5])
        name = f"{prefix[: _LONGEST - 6].rstrip('-')}-{suffix}"
        if name not in taken:
            return name
        salt += 1
