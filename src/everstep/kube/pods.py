"""The Pods of a cluster, as manifests. Pure.

Names, labels, ports, variables and the ``ray start`` command are KubeRay's, so that what people have around
their clusters (dashboards, network policies, GKE's webhook) goes on working.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

from everstep import __version__
from everstep.kube import gangs, headstate, names, pre_stop, quantities, raystart, services, sidecar
from everstep.kube.containers import add_env, add_ports, add_probes, field, set_env, share_memory
from everstep.kube.spec import ClusterSpec, GroupSpec, HeadSpec, Manifest

_ULIMIT = "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}"
# Pod types that GKE's accelerators have in Ray's node labels, with the cores that count in one chip.
_GENERATIONS = {
    "tpu-v4-podslice": ("v4", 2),
    "tpu-v5-lite-device": ("v5litepod", 1),
    "tpu-v5-lite-podslice": ("v5litepod", 1),
    "tpu-v5p-slice": ("v5p", 2),
    "tpu-v6e-slice": ("v6e", 1),
    "tpu7x": ("v7x", 2),
}


def head_pod(cluster: ClusterSpec, name: str) -> Manifest:
    head = cluster.head
    pod = _pod(cluster, head, name, names.HEAD, names.HEAD_GROUP)
    ray = pod["spec"]["containers"][0]
    defaults = {"dashboard-host": "0.0.0.0", **headstate.start_params(cluster)}
    command = raystart.command(head, defaults, {}, monitor=not cluster.autoscaling)
    headstate.keep_elsewhere(cluster, pod)
    set_env(
        [ray],
        {"RAY_USAGE_STATS_EXTRA_TAGS": f"kuberay_version=everstep-{__version__};kuberay_crd=RayCluster"},
    )
    _run_ray(cluster, head, pod, command, "127.0.0.1")
    ports = services.head_ports(head)
    add_ports(ray, {"metrics": ports["metrics"]} if ray.get("ports") else ports)
    if cluster.autoscaling:
        sidecar.add(cluster, pod)
    return pod


def worker_pod(
    cluster: ClusterSpec,
    group: GroupSpec,
    name: str,
    replica: str,
    index: int,
    host: int,
    gang: gangs.Gang | None = None,
) -> Manifest:
    pod = _pod(cluster, group, name, names.WORKER, group.name)
    pod["metadata"]["labels"].update(
        {
            names.REPLICA_INDEX: str(index),
            names.REPLICA_NAME: replica,
            names.HOST_INDEX: str(host),
            names.LEGACY_REPLICA: names.slice_name(group.name, index),
        }
    )
    pod["metadata"]["annotations"][names.HOSTS] = str(group.num_of_hosts)
    if gang is not None and group.num_of_hosts > 1:
        gangs.join(cluster, group, replica, gang, pod)
    spec, ray = pod["spec"], pod["spec"]["containers"][0]
    address = f"{cluster.head_host}:{cluster.head.port}"
    command = raystart.command(group, {"address": address}, _slice_labels(group, index, host))
    set_env([ray], {"FQ_RAY_IP": cluster.head_host, "RAY_IP": cluster.head_service})
    if group.num_of_hosts > 1:
        spec["hostname"] = names.host_name(group.name, index, host)
        spec["subdomain"] = names.headless_service(cluster.name)
    if _speaks_tpu(group):
        peers = names.host_names(cluster.name, group.name, index, group.num_of_hosts)
        set_env(
            [ray, *(c for c in spec["containers"][1:] if names.TPU_RESOURCE in quantities.asked(c))],
            {
                "TPU_WORKER_ID": str(host),
                "TPU_WORKER_HOSTNAMES": ",".join(peers) if group.num_of_hosts > 1 else "localhost",
                "TPU_NAME": names.slice_name(group.name, index),
            },
        )
    if cluster.autoscaling:
        spec["restartPolicy"] = "Never"
    headstate.wait_for_the_next_head(cluster, ray)
    pre_stop.say_goodbye(spec, ray)
    _run_ray(cluster, group, pod, command, cluster.head_host)
    add_ports(ray, {"metrics": int(group.ray_start_params.get("metrics-export-port") or 0) or 8080})
    spec.setdefault("initContainers", []).append(_wait_for_head(cluster, ray))
    return pod


def _pod(
    cluster: ClusterSpec, member: HeadSpec | GroupSpec, name: str, node_type: str, group: str
) -> Manifest:
    meta = member.template.get("metadata") or {}
    given = names.labels(cluster.name, node_type)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": cluster.namespace,
            "labels": {
                **given,
                names.IS_RAY_NODE: "yes",
                **(meta.get("labels") or {}),
                **member.labels,
                names.CLUSTER: cluster.name,
                names.NODE_TYPE: node_type,
                names.WORKER_GROUP: group,
            },
            "annotations": {**(meta.get("annotations") or {}), names.TEMPLATE: member.fingerprint},
            **({"finalizers": list(meta["finalizers"])} if meta.get("finalizers") else {}),
            "ownerReferences": [cluster.as_owner],
        },
        "spec": copy.deepcopy(member.template["spec"]),
    }


def _run_ray(
    cluster: ClusterSpec, member: HeadSpec | GroupSpec, pod: Manifest, command: str, head_host: str
) -> None:
    """Has the first container run Ray, with all that Ray and those around it expect to find there."""
    spec, ray = pod["spec"], pod["spec"]["containers"][0]
    set_env(
        [ray],
        {
            "RAY_CLUSTER_NAME": field(f"metadata.labels['{names.CLUSTER}']"),
            "RAY_CLUSTER_NAMESPACE": field("metadata.namespace"),
            "RAY_CLOUD_INSTANCE_ID": field("metadata.name"),
            "RAY_NODE_TYPE_NAME": field(f"metadata.labels['{names.WORKER_GROUP}']"),
            "KUBERAY_GEN_RAY_START_CMD": command,
        },
    )
    add_env(
        ray,
        {
            "RAY_PORT": str(cluster.head.port),
            "RAY_ADDRESS": f"{head_host}:{cluster.head.port}",
            "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
            "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
        },
    )
    headstate.believe(cluster, pod)
    for first in spec.get("initContainers") or ():
        set_env([first], {"FQ_RAY_IP": cluster.head_host, "RAY_IP": cluster.head_service})
    if "plasma-directory" not in member.ray_start_params:
        share_memory(spec, ray)
    is_head = isinstance(member, HeadSpec)
    add_probes(ray, member.ray_start_params, cluster.ray_version, is_head=is_head)
    own = " ".join((*(ray.get("command") or ()), *(ray.get("args") or ())))
    if not _keeps_its_command(cluster, pod) and "ray start" not in own:
        ray["command"] = ["/bin/bash", "-c", "--"]
        ray["args"] = [f"{own} && {_ULIMIT}; {command}" if own else f"{_ULIMIT}; {command}"]


def _keeps_its_command(cluster: ClusterSpec, pod: Manifest) -> bool:
    said: Mapping[str, str] = {**pod["metadata"]["annotations"], **cluster.annotations}
    return said.get(names.OVERWRITE_COMMAND, "").lower() == "true"


def _slice_labels(group: GroupSpec, index: int, host: int) -> dict[str, str]:
    """Ray node labels by which a scheduler finds whole slices."""
    labels: dict[str, str] = {}
    name = names.slice_name(group.name, index)
    if group.num_of_hosts > 1:
        labels.update({names.SLICE: name, names.SLICE_HOST: str(host)})
    if _has_tpu(group):
        labels.update({"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(host)})
    return labels | shape_labels(group)


def shape_labels(group: GroupSpec) -> dict[str, str]:
    """Those of them that are the same for all slices of a group: what kind of slices they are."""
    selector = group.template["spec"].get("nodeSelector") or {}
    topology = selector.get(names.TPU_TOPOLOGY_SELECTOR)
    if not topology:
        return {}
    labels = {"ray.io/tpu-topology": topology}
    generation = _GENERATIONS.get(selector.get(names.TPU_ACCELERATOR_SELECTOR, ""))
    if generation:
        chips = math.prod(int(side) for side in topology.split("x"))
        labels["ray.io/tpu-pod-type"] = f"{generation[0]}-{chips * generation[1]}"
        labels["ray.io/accelerator-type"] = f"TPU-{generation[0].upper()}"
    return labels


def _has_tpu(group: GroupSpec) -> bool:
    spec = group.template["spec"]
    return (
        any(names.TPU_RESOURCE in quantities.asked(container) for container in spec["containers"])
        or any(name.upper() == "TPU" for name in group.resources)
        or names.TPU_TOPOLOGY_SELECTOR in (spec.get("nodeSelector") or {})
    )


def _speaks_tpu(group: GroupSpec) -> bool:
    """Whether JAX there may want to know its slice. GPUs find each other by other means."""
    asked = quantities.asked(quantities.ray_container(group.template))
    return _has_tpu(group) or (group.num_of_hosts > 1 and not any(map(raystart.is_gpu, asked)))


def _wait_for_head(cluster: ClusterSpec, ray: Manifest) -> Manifest:
    """That the port is open is enough: ``ray start`` waits for the rest itself. ``ray health-check`` would
    load all of Ray to find it out, which takes ten seconds at a fifth of a CPU; bash connects by itself, and
    is there already.
    """
    host, port = cluster.head_host, cluster.head.port
    waiting = {
        "name": "wait-gcs-ready",
        "image": ray["image"],
        "command": ["/bin/bash", "-c", "--"],
        "args": [
            f"until timeout 5 bash -c '< /dev/tcp/{host}/{port}' 2> /dev/null; do "
            f'echo "waiting for the head at {host}:{port}"; sleep 2; done'
        ],
        "env": copy.deepcopy(ray["env"]),
        "resources": {
            "limits": {"cpu": "200m", "memory": "256Mi"},
            "requests": {"cpu": "200m", "memory": "256Mi"},
        },
    }
    for key in ("imagePullPolicy", "securityContext", "volumeMounts", "envFrom"):
        if key in ray:
            waiting[key] = copy.deepcopy(ray[key])
    return waiting
