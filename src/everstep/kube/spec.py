"""A RayCluster as the operator reads it: typed, with defaults filled in.

Whether a manifest may be read at all is decided in ``validation``; ``parse`` expects one that passed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from everstep.kube import names

Manifest = dict[str, Any]

PLACEMENT_TIMEOUT_S = 900.0
"""How long some hosts of a replica may hold nodes while the others wait for theirs, unless the cluster says
otherwise. Nodes that are only being made for them come within that.
"""


def fingerprint(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Upgrade(Enum):
    """What a changed template means for Pods that run."""

    NONE = "None"
    """Nothing: what is made from then on is as it says."""
    RECREATE = "Recreate"
    """All go at once, the head among them."""
    ROLLING = "Rolling"
    """Replica by replica."""


class RestartPolicy(Enum):
    """What a restarted container means in a replica of several hosts."""

    REPLICA = "Replica"
    """It is no longer in step with its peers: the whole replica is replaced."""
    CONTAINER = "Container"
    """Nothing: what runs there gets along with it."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    num_of_hosts: int
    suspend: bool
    workers_to_delete: frozenset[str]
    ray_start_params: Mapping[str, str]
    resources: Mapping[str, str]
    labels: Mapping[str, str]
    template: Manifest
    restart: RestartPolicy

    @property
    def fingerprint(self) -> str:
        """Of all that its Pods are made of."""
        return fingerprint(self.template, self.ray_start_params, self.resources, self.labels)

    @property
    def desired(self) -> int:
        """How many replicas there should be."""
        return 0 if self.suspend else max(self.min_replicas, min(self.replicas, self.max_replicas))


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    ray_start_params: Mapping[str, str]
    resources: Mapping[str, str]
    labels: Mapping[str, str]
    template: Manifest
    service: Manifest
    service_type: str | None
    service_annotations: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.template, self.ray_start_params, self.resources, self.labels)

    @property
    def port(self) -> int:
        return int(self.ray_start_params.get("port", "6379"))


class FaultTolerance(msgspec.Struct, frozen=True, kw_only=True):
    """Where the head keeps what it knows, so that its successor knows it, too."""

    namespace: str
    redis: str | None = None
    """Its address; none where the head's template says it itself."""
    username: Manifest | None = None
    """``value`` or ``valueFrom``, as of an environment variable."""
    password: Manifest | None = None


class Auth(msgspec.Struct, frozen=True, kw_only=True):
    """The token that Ray wants of its clients."""

    secret: str
    made: bool
    """Whether the Secret is the operator's to make."""
    of_kubernetes: bool
    """Instead of one token, those of Kubernetes' accounts."""


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    namespace: str
    uid: str
    generation: int
    api_version: str
    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    head: HeadSpec
    groups: tuple[GroupSpec, ...]
    suspend: bool
    autoscaling: bool
    autoscaler: Manifest
    ray_version: str = ""
    fault_tolerance: FaultTolerance | None = None
    auth: Auth | None = None
    upgrade: Upgrade = Upgrade.NONE
    max_unavailable: int = 1
    """Replicas of a group that may be away at once for an upgrade."""
    placement_timeout_s: float = PLACEMENT_TIMEOUT_S
    """How long a replica may hold some of its nodes and wait for the others."""

    @property
    def head_service(self) -> str:
        """The head's Service has a name of its own, where the manifest gives it one."""
        given = (self.head.service.get("metadata") or {}).get("name")
        return given or names.head_service(self.name)

    @property
    def head_host(self) -> str:
        return f"{self.head_service}.{self.namespace}.svc.cluster.local"

    @property
    def as_owner(self) -> Manifest:
        return {
            "apiVersion": self.api_version,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    @property
    def needs_headless_service(self) -> bool:
        return any(group.num_of_hosts > 1 for group in self.groups)


def parse(raw: Mapping[str, Any]) -> ClusterSpec:
    meta, spec = raw["metadata"], _without_nulls(raw["spec"])
    annotations = meta.get("annotations") or {}
    suspend = bool(spec.get("suspend"))
    head = spec["headGroupSpec"]
    return ClusterSpec(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        api_version=raw.get("apiVersion", f"{names.GROUP}/{names.VERSION}"),
        annotations=annotations,
        labels=meta.get("labels") or {},
        head=HeadSpec(
            ray_start_params=head.get("rayStartParams") or {},
            resources=_texts(head.get("resources")),
            labels=head.get("labels") or {},
            template=head["template"],
            service=head.get("headService") or {},
            service_type=head.get("serviceType"),
            service_annotations=spec.get("headServiceAnnotations") or {},
        ),
        groups=tuple(_group(group, annotations) for group in spec.get("workerGroupSpecs") or ()),
        suspend=suspend,
        autoscaling=bool(spec.get("enableInTreeAutoscaling")),
        autoscaler=spec.get("autoscalerOptions") or {},
        ray_version=spec.get("rayVersion") or "",
        fault_tolerance=_fault_tolerance(meta, spec.get("gcsFaultToleranceOptions"), annotations),
        upgrade=_upgrade(spec.get("upgradeStrategy") or {}, annotations),
        max_unavailable=int(annotations.get(names.MAX_UNAVAILABLE) or 1),
        placement_timeout_s=float(annotations.get(names.PLACEMENT_TIMEOUT) or PLACEMENT_TIMEOUT_S),
        auth=_auth(meta["name"], spec.get("authOptions") or {}),
    )


def _group(raw: Mapping[str, Any], cluster_annotations: Mapping[str, str]) -> GroupSpec:
    least = raw.get("minReplicas") or 0
    replicas = raw.get("replicas")
    template = raw["template"]
    annotations = {**cluster_annotations, **((template.get("metadata") or {}).get("annotations") or {})}
    return GroupSpec(
        name=raw["groupName"],
        replicas=least if replicas is None else replicas,
        min_replicas=least,
        max_replicas=raw["maxReplicas"] if raw.get("maxReplicas") is not None else 2**31 - 1,
        num_of_hosts=raw.get("numOfHosts") or 1,
        suspend=bool(raw.get("suspend")),
        workers_to_delete=frozenset((raw.get("scaleStrategy") or {}).get("workersToDelete") or ()),
        ray_start_params=raw.get("rayStartParams") or {},
        resources=_texts(raw.get("resources")),
        labels=raw.get("labels") or {},
        template=template,
        restart=RestartPolicy(annotations.get(names.RESTART_POLICY, RestartPolicy.REPLICA.value)),
    )


def _upgrade(strategy: Mapping[str, Any], annotations: Mapping[str, str]) -> Upgrade:
    if names.MAX_UNAVAILABLE in annotations:
        return Upgrade.ROLLING
    return Upgrade.RECREATE if strategy.get("type") == Upgrade.RECREATE.value else Upgrade.NONE


def _fault_tolerance(
    meta: Mapping[str, Any], options: Mapping[str, Any] | None, annotations: Mapping[str, str]
) -> FaultTolerance | None:
    """By the field, or by the annotation that was there before it."""
    if options is None and annotations.get(names.FT_ENABLED, "").lower() != "true":
        return None
    given = options or {}
    return FaultTolerance(
        namespace=given.get("externalStorageNamespace")
        or annotations.get(names.STORAGE_NAMESPACE)
        or meta["uid"],
        redis=given.get("redisAddress"),
        username=given.get("redisUsername"),
        password=given.get("redisPassword"),
    )


def _auth(cluster: str, options: Mapping[str, Any]) -> Auth | None:
    if options.get("mode") != "token":
        return None
    given, of_kubernetes = options.get("secretName"), bool(options.get("enableK8sTokenAuth"))
    return Auth(secret=given or cluster, made=not given and not of_kubernetes, of_kubernetes=of_kubernetes)


def _texts(quantities: Mapping[str, Any] | None) -> dict[str, str]:
    return {key: str(value) for key, value in (quantities or {}).items()}


def _without_nulls(value: Any) -> Any:
    """To Kubernetes a null is a field that isn't there."""
    if isinstance(value, dict):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    if isinstance(value, list):
        return [_without_nulls(inside) for inside in value]
    return value
