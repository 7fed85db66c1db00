"""Ray's own autoscaler, version 2, beside the head: its container, its account and its rights. Pure."""

from __future__ import annotations

from typing import Any

from everstep.kube import names
from everstep.kube.containers import field, set_env, share_folder
from everstep.kube.spec import ClusterSpec, Manifest

_LOGS = "/tmp/ray"
_DEFAULT_RESOURCES = {
    "limits": {"cpu": "500m", "memory": "512Mi"},
    "requests": {"cpu": "500m", "memory": "512Mi"},
}
_RBAC = "rbac.authorization.k8s.io"


def add(cluster: ClusterSpec, pod: Manifest) -> None:
    """Has the autoscaler run in the head's Pod."""
    spec, ray = pod["spec"], pod["spec"]["containers"][0]
    spec["restartPolicy"] = "Never"
    spec.setdefault("serviceAccountName", cluster.name)
    set_env([ray], {"RAY_enable_autoscaler_v2": "true"})
    # It writes beside the head's other logs, in Ray's own folder.
    share_folder(spec, ray, "ray-logs", _LOGS, {})
    spec["containers"].append(_container(cluster, ray))


def _container(cluster: ClusterSpec, ray: Manifest) -> Manifest:
    options = cluster.autoscaler
    start = (
        "ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME) "
        "--cluster-namespace $(RAY_CLUSTER_NAMESPACE)"
        + ("" if cluster.head.port == 6379 else f" --gcs-address $(POD_IP):{cluster.head.port}")
    )
    container: dict[str, Any] = {
        "name": names.AUTOSCALER,
        "image": options.get("image") or ray["image"],
        "imagePullPolicy": options.get("imagePullPolicy") or ray.get("imagePullPolicy") or "IfNotPresent",
        "command": options.get("command") or ["/bin/bash", "-c", "--"],
        "args": options.get("args") or [start],
        "env": [],
        "resources": options.get("resources") or _DEFAULT_RESOURCES,
        "volumeMounts": [
            m for m in ray["volumeMounts"] if m.get("mountPath") == _LOGS or m.get("name") == "ray-token"
        ]
        + list(options.get("volumeMounts") or ()),
    }
    for key in ("envFrom", "securityContext"):
        if key in options:
            container[key] = options[key]
    set_env(
        [container],
        {
            "RAY_CLUSTER_NAME": field(f"metadata.labels['{names.CLUSTER}']"),
            "RAY_CLUSTER_NAMESPACE": field("metadata.namespace"),
            "RAY_HEAD_POD_NAME": field("metadata.name"),
            "POD_IP": field("status.podIP"),
            "KUBERAY_CRD_VER": names.VERSION,
            "KUBERAY_GEN_AUTOSCALER_START_CMD": start,
            "RAY_enable_autoscaler_v2": "true",
        },
    )
    # Where the head wants a token of its clients, this is one of them.
    container["env"] += [
        variable for variable in ray["env"] if variable["name"].startswith(("RAY_AUTH_", "RAY_ENABLE_K8S"))
    ]
    container["env"] += list(options.get("env") or ())
    return container


def account(cluster: ClusterSpec) -> tuple[Manifest, ...]:
    """The autoscaler's account, unless the head has one of its own, and the least that it needs."""
    if not cluster.autoscaling:
        return ()
    given = cluster.head.template["spec"].get("serviceAccountName")
    meta = {
        "name": cluster.name,
        "namespace": cluster.namespace,
        "labels": names.labels(cluster.name, names.HEAD),
        "ownerReferences": [cluster.as_owner],
    }
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]},
        {
            "apiGroups": [names.GROUP],
            "resources": [names.PLURAL],
            "resourceNames": [cluster.name],
            "verbs": ["get", "patch"],
        },
    ]
    role = {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": meta, "rules": rules}
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "subjects": [
            {"kind": "ServiceAccount", "name": given or cluster.name, "namespace": cluster.namespace}
        ],
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": cluster.name},
    }
    if given:
        return (role, binding)
    return ({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta}, role, binding)
