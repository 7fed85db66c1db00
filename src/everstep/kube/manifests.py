"""What is applied for the operator to run in a cluster: its account, the least of rights, and itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.kube import names
from everstep.kube.gangs import GANGS
from everstep.kube.webhook import Webhook, configuration

Manifest = dict[str, Any]

_RBAC = "rbac.authorization.k8s.io"
_PORT = 9443
_METRICS_PORT = 8080


def manifests(image: str, home: str, namespaces: Sequence[str], all_clusters: bool) -> list[Manifest]:
    """Everything but the definition of RayClusters. ``home`` is the namespace that the operator lives in."""
    account = {"kind": "ServiceAccount", "name": names.OPERATOR, "namespace": home}
    made: list[Manifest] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": home}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _meta(home)},
        _role("ClusterRole", None, _everywhere()),
        _binding("ClusterRoleBinding", "ClusterRole", None, account),
    ]
    if namespaces:
        for namespace in namespaces:
            made += [
                _role("Role", namespace, [*_in_namespace(), _leases()]),
                _binding("RoleBinding", "Role", namespace, account),
            ]
    else:
        made[2]["rules"] += [*_in_namespace(), _leases()]
    service = (home, names.OPERATOR)
    made += [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _meta(home),
            "spec": {
                "selector": {"app.kubernetes.io/name": names.OPERATOR},
                "ports": [{"name": "webhook", "port": 443, "targetPort": _PORT}],
            },
        },
        configuration(Webhook(service=service), None),
        _deployment(image, home, namespaces, all_clusters),
    ]
    return made


def _everywhere() -> list[Manifest]:
    """Looking for KubeRay, watching nodes, and saying where the webhook is."""
    return [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]},
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["list"]},
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "resourceNames": [f"{names.PLURAL}.{names.GROUP}"],
            "verbs": ["get"],
        },
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["validatingwebhookconfigurations"],
            "resourceNames": [names.OPERATOR],
            # get: whom the API server believes already, like an operator that stands by.
            "verbs": ["get", "patch"],
        },
    ]


def _in_namespace() -> list[Manifest]:
    return [
        # patch: the autoscaler has it, and nobody can give what they don't have.
        {"apiGroups": [names.GROUP], "resources": [names.PLURAL], "verbs": ["get", "list", "watch", "patch"]},
        {"apiGroups": [names.GROUP], "resources": [f"{names.PLURAL}/status"], "verbs": ["patch"]},
        {"apiGroups": [names.GROUP], "resources": [f"{names.PLURAL}/finalizers"], "verbs": ["update"]},
        # Nothing runs these: they get an event that says so.
        {"apiGroups": [names.GROUP], "resources": ["rayjobs", "rayservices"], "verbs": ["list", "watch"]},
        {
            "apiGroups": [""],
            "resources": ["pods"],
            "verbs": ["get", "list", "watch", "create", "patch", "delete"],
        },
        {"apiGroups": [""], "resources": ["services"], "verbs": ["get", "list", "watch", "create", "patch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["get", "create", "patch"]},
        # get: whether what is there under their name is of an earlier cluster.
        {"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": ["get", "create"]},
        # A PodGroup for each slice, where a scheduler knows them.
        {
            "apiGroups": sorted({gang.api.partition("/")[0] for gang in GANGS if gang.api and gang.spec}),
            "resources": ["podgroups"],
            "verbs": ["list", "watch", "create", "delete"],
        },
        # The token of a cluster that wants one. They aren't read.
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {"apiGroups": [_RBAC], "resources": ["roles", "rolebindings"], "verbs": ["get", "create"]},
    ]


def _leases() -> Manifest:
    return {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "update"],
    }


def _deployment(image: str, home: str, namespaces: Sequence[str], all_clusters: bool) -> Manifest:
    arguments = ["operator", "run", f"--lease-namespace={home}", f"--webhook-service={home}/{names.OPERATOR}"]
    arguments.append(f"--metrics-port={_METRICS_PORT}")
    arguments += [f"--namespace={namespace}" for namespace in namespaces]
    if all_clusters:
        arguments.append("--all-clusters")
    labels = {"app.kubernetes.io/name": names.OPERATOR}
    container = {
        "name": "operator",
        "image": image,
        "command": ["everstep"],
        "args": arguments,
        "ports": [
            {"name": "webhook", "containerPort": _PORT},
            {"name": "metrics", "containerPort": _METRICS_PORT},
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        # One that stands by is ready, too: an update starts the next one before it ends the last.
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": _METRICS_PORT},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "failureThreshold": 6,
        },
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": _METRICS_PORT}, "periodSeconds": 5},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(home),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {
                        "prometheus.io/scrape": "true",
                        "prometheus.io/port": str(_METRICS_PORT),
                    },
                },
                "spec": {
                    "serviceAccountName": names.OPERATOR,
                    "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
                    "containers": [container],
                    "volumes": [{"name": "tmp", "emptyDir": {}}],
                },
            },
        },
    }


def _meta(namespace: str | None) -> Manifest:
    where = {"namespace": namespace} if namespace else {}
    return {"name": names.OPERATOR, **where, "labels": {names.CREATED_BY: names.OPERATOR}}


def _role(kind: str, namespace: str | None, rules: list[Manifest]) -> Manifest:
    return {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": _meta(namespace), "rules": rules}


def _binding(kind: str, role: str, namespace: str | None, account: Manifest) -> Manifest:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": kind,
        "metadata": _meta(namespace),
        "roleRef": {"apiGroup": _RBAC, "kind": role, "name": names.OPERATOR},
        "subjects": [account],
    }
