"""What the head keeps elsewhere, and whom it believes: GCS fault tolerance and tokens, as KubeRay. Pure."""

from __future__ import annotations

from everstep.kube import names
from everstep.kube.containers import add_env, set_env
from everstep.kube.spec import ClusterSpec, Manifest

TOKEN_KEY = "auth_token"
_TOKENS = "/var/run/secrets/ray.io/serviceaccount"
_RECONNECTING_S = "600"
"""How long a worker's raylet waits for a head that is being replaced. Ray's own default is a minute."""


def start_params(cluster: ClusterSpec) -> dict[str, str]:
    """Flags of the head that refer to variables, so that no password is in a command."""
    tolerance = cluster.fault_tolerance
    if tolerance is None or tolerance.redis is None:
        return {}
    given = {"redis-username": tolerance.username, "redis-password": tolerance.password}
    return {flag: f"${flag.upper().replace('-', '_')}" for flag, value in given.items() if value is not None}


def keep_elsewhere(cluster: ClusterSpec, pod: Manifest) -> None:
    """The head's state in Redis, so that its death costs no worker."""
    tolerance, ray = cluster.fault_tolerance, pod["spec"]["containers"][0]
    pod["metadata"]["annotations"][names.FT_ENABLED] = str(tolerance is not None).lower()
    if tolerance is None:
        return
    pod["metadata"]["annotations"][names.STORAGE_NAMESPACE] = tolerance.namespace
    add_env(ray, {"RAY_external_storage_namespace": tolerance.namespace})
    if tolerance.redis is not None:
        set_env([ray], {"RAY_REDIS_ADDRESS": tolerance.redis})
        for name, value in (("REDIS_USERNAME", tolerance.username), ("REDIS_PASSWORD", tolerance.password)):
            if value is not None:
                set_env([ray], {name: value})
    elif "redis-password" in cluster.head.ray_start_params:
        add_env(ray, {"REDIS_PASSWORD": cluster.head.ray_start_params["redis-password"]})


def wait_for_the_next_head(cluster: ClusterSpec, ray: Manifest) -> None:
    if cluster.fault_tolerance is not None:
        add_env(ray, {"RAY_gcs_rpc_server_reconnect_timeout_s": _RECONNECTING_S})


def believe(cluster: ClusterSpec, pod: Manifest) -> None:
    """Ray's container shows the token, and wants it shown. What is copied from it does, too."""
    auth, spec = cluster.auth, pod["spec"]
    if auth is None:
        return
    ray = spec["containers"][0]
    add_env(ray, {"RAY_AUTH_MODE": "token"})
    if not auth.of_kubernetes:
        reference = {"secretKeyRef": {"name": auth.secret, "key": TOKEN_KEY}}
        add_env(ray, {"RAY_AUTH_TOKEN": {"valueFrom": reference}})
        return
    add_env(ray, {"RAY_ENABLE_K8S_TOKEN_AUTH": "true"})
    mounts = ray.setdefault("volumeMounts", [])
    if not any(mount.get("name") == "ray-token" for mount in mounts):
        mounts.append({"name": "ray-token", "mountPath": _TOKENS, "readOnly": True})
        source = {"sources": [{"serviceAccountToken": {"path": "token"}}]}
        spec.setdefault("volumes", []).append({"name": "ray-token", "projected": source})


def secret(cluster: ClusterSpec) -> tuple[Manifest, ...]:
    """For a token of the cluster's own, where the user gives none. What is in it is made up when it is
    made; one that is there already stays.
    """
    if cluster.auth is None or not cluster.auth.made:
        return ()
    meta = {
        "name": cluster.auth.secret,
        "namespace": cluster.namespace,
        "labels": names.labels(cluster.name, names.HEAD),
        "ownerReferences": [cluster.as_owner],
    }
    return ({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque"},)
