"""The Pods and Services of a cluster, as manifests. Pure.

Names, labels, ports and the ``ray start`` command are KubeRay's, so that what people have around their
clusters (dashboards, network policies, GKE's webhook) goes on working.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from everstep.kube import names, quantities
from everstep.kube.spec import Cluster, GroupSpec, HeadSpec, Manifest

_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
_AGENT_PORT = "52365"
_METRICS_PORT = "8080"
# Pod types that GKE's accelerators have in Ray's node labels, with the cores that count in one chip.
_GENERATIONS = {
    "tpu-v4-podslice": ("v4", 2),
    "tpu-v5-lite-device": ("v5litepod", 1),
    "tpu-v5-lite-podslice": ("v5litepod", 1),
    "tpu-v5p-slice": ("v5p", 2),
    "tpu-v6e-slice": ("v6e", 1),
    "tpu7x": ("v7x", 2),
}


def head_pod(cluster: Cluster, name: str) -> Manifest:
    head = cluster.head
    pod = _pod(cluster, head.template, name, names.HEAD, names.HEAD_GROUP)
    pod["metadata"]["labels"][names.IDENTIFIER] = f"{cluster.name}-head"
    params = dict(head.ray_start_params)
    params.setdefault("dashboard-host", "0.0.0.0")
    if cluster.autoscaling:
        params.setdefault("no-monitor", "true")
    command = _ray_start(params, head, {}, "--head")
    ray = pod["spec"]["containers"][0]
    env = {"RAY_ADDRESS": f"127.0.0.1:{head.port}", "RAY_PORT": str(head.port)}
    if cluster.autoscaling:
        env["RAY_enable_autoscaler_v2"] = "1"
    _run_ray(cluster, ray, command, env)
    ports = ray.setdefault("ports", [])
    given = {port.get("name") for port in ports}
    ports += [
        {"name": port, "containerPort": number}
        for port, number in _head_ports(head).items()
        if port not in given and not given & set(_HEAD_PORTS)
    ]
    _probe(ray, f"http://localhost:{params.get('dashboard-port', '8265')}/api/gcs_healthz", params)
    if cluster.autoscaling:
        pod["spec"]["restartPolicy"] = "Never"
        pod["spec"].setdefault("serviceAccountName", cluster.name)
        _share_logs(pod["spec"], ray)
        pod["spec"]["containers"].append(_autoscaler(cluster, ray))
    return pod


def worker_pod(
    cluster: Cluster, group: GroupSpec, name: str, replica: str, index: int, host: int
) -> Manifest:
    pod = _pod(cluster, group.template, name, names.WORKER, group.name)
    pod["metadata"]["labels"].update(
        {
            names.REPLICA_INDEX: str(index),
            names.REPLICA_NAME: replica,
            names.HOST_INDEX: str(host),
            names.LEGACY_REPLICA: names.slice_name(group.name, index),
        }
    )
    pod["metadata"]["annotations"][names.HOSTS] = str(group.num_of_hosts)
    spec, ray = pod["spec"], pod["spec"]["containers"][0]
    address = names.head_address(cluster.name, cluster.namespace)
    params = {**group.ray_start_params, "address": f"{address}:{cluster.head.port}"}
    command = _ray_start(params, group, _slice_labels(group, index, host), "")
    env = {
        "FQ_RAY_IP": address,
        "RAY_IP": names.head_service(cluster.name),
        "RAY_PORT": str(cluster.head.port),
        "RAY_ADDRESS": f"{address}:{cluster.head.port}",
    }
    _run_ray(cluster, ray, command, env)
    if group.num_of_hosts > 1:
        spec["hostname"] = names.host_name(group.name, index, host)
        spec["subdomain"] = names.headless_service(cluster.name)
    if _speaks_tpu(group):
        peers = names.host_names(cluster.name, group.name, index, group.num_of_hosts)
        _set_env(
            [ray, *(c for c in spec["containers"][1:] if names.TPU_RESOURCE in quantities.asked(c))],
            {
                "TPU_WORKER_ID": str(host),
                "TPU_WORKER_HOSTNAMES": ",".join(peers) if group.num_of_hosts > 1 else "localhost",
                "TPU_NAME": names.slice_name(group.name, index),
            },
        )
    if cluster.autoscaling:
        spec["restartPolicy"] = "Never"
    _probe(ray, "", params)
    spec["initContainers"] = [*(spec.get("initContainers") or []), _wait_for_head(cluster, ray)]
    return pod


def head_service(cluster: Cluster) -> Manifest:
    head = cluster.head
    given = copy.deepcopy(head.service)
    meta, spec = given.get("metadata") or {}, given.get("spec") or {}
    ports = head.template["spec"]["containers"][0].get("ports") or [
        {"name": name, "containerPort": number} for name, number in _head_ports(head).items()
    ]
    spec.setdefault(
        "ports",
        [
            {
                "name": port.get("name") or f"port-{port['containerPort']}",
                "port": port["containerPort"],
                "targetPort": port["containerPort"],
                "protocol": port.get("protocol", "TCP"),
            }
            for port in ports
        ],
    )
    if head.service_type:
        spec.setdefault("type", head.service_type)
    if spec.get("type", "ClusterIP") == "ClusterIP":
        spec.setdefault("clusterIP", "None")
    spec["selector"] = {names.CLUSTER: cluster.name, names.NODE_TYPE: names.HEAD}
    spec["publishNotReadyAddresses"] = True
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.head_service(cluster.name),
            "namespace": cluster.namespace,
            "labels": {**(meta.get("labels") or {}), **_labels(cluster, names.HEAD)},
            "annotations": {**(meta.get("annotations") or {}), **head.service_annotations},
            "ownerReferences": [_owner(cluster)],
        },
        "spec": spec,
    }


def headless_service(cluster: Cluster) -> Manifest:
    """Gives each host of a slice a name that stays the same when the slice is replaced."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.headless_service(cluster.name),
            "namespace": cluster.namespace,
            "labels": _labels(cluster, names.WORKER),
            "ownerReferences": [_owner(cluster)],
        },
        "spec": {
            "clusterIP": "None",
            "selector": {names.CLUSTER: cluster.name, names.NODE_TYPE: names.WORKER},
            # Hosts look for each other before they are ready.
            "publishNotReadyAddresses": True,
        },
    }


def beside_head(cluster: Cluster) -> tuple[Manifest, ...]:
    """The autoscaler's account, and the least that it needs. The head's own account, if it has one."""
    account = cluster.head.template["spec"].get("serviceAccountName")
    if not cluster.autoscaling:
        return ()
    meta = {
        "name": cluster.name,
        "namespace": cluster.namespace,
        "labels": _labels(cluster, names.HEAD),
        "ownerReferences": [_owner(cluster)],
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
    rbac = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": rules}
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "subjects": [
            {"kind": "ServiceAccount", "name": account or cluster.name, "namespace": cluster.namespace}
        ],
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": cluster.name},
    }
    if account:
        return (role, binding)
    return ({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta}, role, binding)


def _pod(cluster: Cluster, template: Manifest, name: str, node_type: str, group: str) -> Manifest:
    meta = template.get("metadata") or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": cluster.namespace,
            "labels": {
                **(meta.get("labels") or {}),
                **_labels(cluster, node_type),
                names.WORKER_GROUP: group,
                names.IS_RAY_NODE: "yes",
            },
            "annotations": dict(meta.get("annotations") or {}),
            "ownerReferences": [_owner(cluster)],
        },
        "spec": copy.deepcopy(template["spec"]),
    }


def _labels(cluster: Cluster, node_type: str) -> dict[str, str]:
    return {
        names.CLUSTER: cluster.name,
        names.NODE_TYPE: node_type,
        names.IDENTIFIER: f"{cluster.name}-{node_type}",
        names.CREATED_BY: names.OPERATOR,
    }


def _owner(cluster: Cluster) -> Manifest:
    return {
        "apiVersion": cluster.api_version,
        "kind": names.KIND,
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _head_ports(head: HeadSpec) -> dict[str, int]:
    given = head.ray_start_params
    return {
        **_HEAD_PORTS,
        "gcs-server": head.port,
        "dashboard": int(given.get("dashboard-port", _HEAD_PORTS["dashboard"])),
        "client": int(given.get("ray-client-server-port", _HEAD_PORTS["client"])),
        "metrics": int(given.get("metrics-export-port", _HEAD_PORTS["metrics"])) or _HEAD_PORTS["metrics"],
    }


def _ray_start(
    params: Mapping[str, str], member: HeadSpec | GroupSpec, slice_labels: Mapping[str, str], how: str
) -> str:
    flags = {
        "block": "true",
        "dashboard-agent-listen-port": _AGENT_PORT,
        "metrics-export-port": _METRICS_PORT,
    }
    flags.update(_resource_flags(member))
    flags.update(params)
    labels = {**member.labels, **slice_labels}
    if labels:
        flags["labels"] = shlex.quote(",".join(f"{key}={value}" for key, value in labels.items()))
    words = ["ray start", *([how] if how else [])]
    for key, value in sorted(flags.items()):
        if value == "true":
            words.append(f"--{key}")
        elif value != "false":
            words.append(f"--{key}={value}")
    return " ".join(words)


def _resource_flags(member: HeadSpec | GroupSpec) -> dict[str, str]:
    """What Ray should believe that the node has: as the group says, else as its container may use."""
    asked = quantities.asked(quantities.ray_container(member.template))
    given = dict(member.resources)
    flags: dict[str, str] = {}
    cpu = given.pop("CPU", None) if "CPU" in given else asked.get("cpu")
    gpu = (
        given.pop("GPU", None)
        if "GPU" in given
        else next((v for k, v in asked.items() if k.endswith("gpu")), None)
    )
    memory = given.pop("memory", None) if "memory" in given else asked.get("memory")
    if "TPU" not in given and names.TPU_RESOURCE in asked:
        given["TPU"] = str(asked[names.TPU_RESOURCE])
    for flag, value in (("num-cpus", cpu), ("num-gpus", gpu), ("memory", memory)):
        if value is not None:
            flags[flag] = str(quantities.rounded_up(value))
    custom = {key: quantities.rounded_up(value) for key, value in given.items()}
    if custom:
        flags["resources"] = shlex.quote(json.dumps(custom))
    return flags


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
        or "TPU" in group.resources
        or names.TPU_TOPOLOGY_SELECTOR in (spec.get("nodeSelector") or {})
    )


def _speaks_tpu(group: GroupSpec) -> bool:
    """Whether JAX there may want to know its slice. GPUs find each other by other means."""
    asked = quantities.asked(quantities.ray_container(group.template))
    return _has_tpu(group) or (group.num_of_hosts > 1 and not any(key.endswith("gpu") for key in asked))


def _run_ray(cluster: Cluster, ray: Manifest, command: str, env: Mapping[str, str]) -> None:
    node = {
        "RAY_CLUSTER_NAME": _field(f"metadata.labels['{names.CLUSTER}']"),
        "RAY_CLOUD_INSTANCE_ID": _field("metadata.name"),
        "RAY_NODE_TYPE_NAME": _field(f"metadata.labels['{names.WORKER_GROUP}']"),
    }
    given = {variable["name"] for variable in ray.get("env") or ()}
    # Those from fields first: later ones may refer to them.
    _set_env([ray], {key: value for key, value in node.items() if key not in given})
    _set_env(
        [ray],
        {key: value for key, value in env.items() if key not in given or key in ("FQ_RAY_IP", "RAY_IP")},
    )
    _set_env([ray], {"KUBERAY_GEN_RAY_START_CMD": command, "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1"})
    if cluster.annotations.get(names.OVERWRITE_COMMAND) == "true":
        return
    own = " ".join((*(ray.get("command") or ()), *(ray.get("args") or ())))
    if "ray start" in own:
        return
    ray["command"] = ["/bin/bash", "-c", "--"]
    ray["args"] = [f"{own} && ulimit -n 65536; {command}" if own else f"ulimit -n 65536; {command}"]


def _field(path: str) -> Manifest:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _set_env(containers: list[Manifest], env: Mapping[str, str | Manifest]) -> None:
    for container in containers:
        variables = [v for v in container.get("env") or () if v["name"] not in env]
        for name, value in env.items():
            variables.append({"name": name, **({"value": value} if isinstance(value, str) else value)})
        container["env"] = variables


def _probe(ray: Manifest, also: str, params: Mapping[str, str]) -> None:
    """Alive and ready as Ray itself says. Those that the template brings are left as they are."""
    port = params.get("dashboard-agent-listen-port", _AGENT_PORT)
    urls = [f"http://localhost:{port}/api/local_raylet_healthz", *([also] if also else [])]
    check = " && ".join(f"wget --tries 1 -T 5 -q -O- {url} | grep success" for url in urls)
    for kind, period, failures in (("livenessProbe", 5, 120), ("readinessProbe", 5, 10)):
        ray.setdefault(
            kind,
            {
                "exec": {"command": ["bash", "-c", check]},
                "initialDelaySeconds": 10,
                "periodSeconds": period,
                "timeoutSeconds": 10,
                "failureThreshold": failures,
            },
        )


def _wait_for_head(cluster: Cluster, ray: Manifest) -> Manifest:
    address = f"{names.head_address(cluster.name, cluster.namespace)}:{cluster.head.port}"
    waiting = {
        "name": "wait-gcs-ready",
        "image": ray["image"],
        "command": ["/bin/bash", "-c", "--"],
        "args": [
            f"until ray health-check --address {address} --skip-version-check > /dev/null 2>&1; do "
            f'echo "waiting for the head at {address}"; sleep 2; done'
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


def _share_logs(spec: Manifest, ray: Manifest) -> None:
    """The autoscaler writes beside the head's other logs, in Ray's own folder."""
    volumes = spec.setdefault("volumes", [])
    mounts = ray.setdefault("volumeMounts", [])
    if not any(mount.get("mountPath") == "/tmp/ray" for mount in mounts):
        mounts.append({"name": "ray-logs", "mountPath": "/tmp/ray"})
        if not any(volume.get("name") == "ray-logs" for volume in volumes):
            volumes.append({"name": "ray-logs", "emptyDir": {}})


def _autoscaler(cluster: Cluster, ray: Manifest) -> Manifest:
    """Ray's own autoscaler, version 2, as the head's sidecar."""
    options = cluster.autoscaler
    container: dict[str, Any] = {
        "name": names.AUTOSCALER,
        "image": options.get("image") or ray["image"],
        "imagePullPolicy": options.get("imagePullPolicy") or ray.get("imagePullPolicy") or "IfNotPresent",
        "command": ["/bin/bash", "-c", "--"],
        "args": [
            "ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME) "
            "--cluster-namespace $(RAY_CLUSTER_NAMESPACE)"
            + ("" if cluster.head.port == 6379 else f" --gcs-address $(POD_IP):{cluster.head.port}")
        ],
        "env": [],
        "resources": options.get("resources")
        or {"limits": {"cpu": "500m", "memory": "512Mi"}, "requests": {"cpu": "500m", "memory": "512Mi"}},
        "volumeMounts": [m for m in ray["volumeMounts"] if m.get("mountPath") == "/tmp/ray"]
        + list(options.get("volumeMounts") or ()),
    }
    for key in ("envFrom", "securityContext"):
        if key in options:
            container[key] = options[key]
    _set_env(
        [container],
        {
            "RAY_CLUSTER_NAME": _field(f"metadata.labels['{names.CLUSTER}']"),
            "RAY_CLUSTER_NAMESPACE": _field("metadata.namespace"),
            "RAY_HEAD_POD_NAME": _field("metadata.name"),
            "POD_IP": _field("status.podIP"),
            "KUBERAY_CRD_VER": names.VERSION,
            "RAY_enable_autoscaler_v2": "1",
        },
    )
    # Where the head wants a token of its clients, this is one of them.
    container["env"] += [variable for variable in ray["env"] if variable["name"].startswith("RAY_AUTH_")]
    container["env"] += list(options.get("env") or ())
    return container
