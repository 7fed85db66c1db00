"""Small changes to a container: its environment, its volumes, its ports, its probes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from everstep.kube import quantities
from everstep.kube.raystart import AGENT_PORT
from everstep.kube.spec import Manifest

_PROBES = {
    "livenessProbe": {"initialDelaySeconds": 30, "periodSeconds": 5, "failureThreshold": 120},
    "readinessProbe": {"initialDelaySeconds": 10, "periodSeconds": 5, "failureThreshold": 10},
}
_ONE_ENDPOINT_SINCE = (2, 53)
"""Ray answers for the whole node at one address since then, and images need no wget."""


def field(path: str) -> Manifest:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def set_env(containers: Sequence[Manifest], env: Mapping[str, str | Manifest]) -> None:
    for container in containers:
        variables = [v for v in container.get("env") or () if v["name"] not in env]
        for name, value in env.items():
            variables.append({"name": name, **({"value": value} if isinstance(value, str) else value)})
        container["env"] = variables


def add_env(container: Manifest, env: Mapping[str, str | Manifest]) -> None:
    """Those that the container doesn't bring itself."""
    given = {variable["name"] for variable in container.get("env") or ()}
    set_env([container], {name: value for name, value in env.items() if name not in given})


def share_folder(spec: Manifest, container: Manifest, volume: str, path: str, source: Manifest) -> None:
    """An empty folder at ``path``, unless something is mounted there already."""
    mounts = container.setdefault("volumeMounts", [])
    if any(mount.get("mountPath") == path for mount in mounts):
        return
    volumes = spec.setdefault("volumes", [])
    if not any(known.get("name") == volume for known in volumes):
        volumes.append({"name": volume, "emptyDir": source})
    mounts.append({"name": volume, "mountPath": path})


def share_memory(spec: Manifest, ray: Manifest) -> None:
    """Ray's object store lives in ``/dev/shm``, and a container runtime gives it 64 MiB."""
    memory = quantities.asked(ray).get("memory")
    size = {"sizeLimit": memory} if memory is not None else {}
    share_folder(spec, ray, "shared-mem", "/dev/shm", {"medium": "Memory", **size})


def add_ports(container: Manifest, ports: Mapping[str, int]) -> None:
    declared = container.setdefault("ports", [])
    names = {port.get("name") for port in declared}
    numbers = {port.get("containerPort") for port in declared}
    declared += [
        {"name": name, "containerPort": number}
        for name, number in ports.items()
        if name not in names and number not in numbers
    ]


def add_probes(ray: Manifest, params: Mapping[str, str], ray_version: str, *, is_head: bool) -> None:
    """Alive and ready as Ray itself says. Those that the template brings are left as they are."""
    port = params.get("dashboard-agent-listen-port", AGENT_PORT)
    if version(ray_version) >= _ONE_ENDPOINT_SINCE and port.isdigit():
        check: Manifest = {"httpGet": {"path": "/api/healthz", "port": int(port)}}
    else:
        urls = [f"http://localhost:{port}/api/local_raylet_healthz"]
        if is_head:
            urls.append(f"http://localhost:{params.get('dashboard-port', '8265')}/api/gcs_healthz")
        said = " && ".join(f"wget --tries 1 -T 2 -q -O- {url} | grep success" for url in urls)
        check = {"exec": {"command": ["bash", "-c", said]}}
    for kind, times in _PROBES.items():
        ray.setdefault(kind, {**check, **times, "timeoutSeconds": 5 if is_head else 2})


def version(text: str) -> tuple[int, ...]:
    """Of Ray; nothing, where it isn't known."""
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})", text)
    return (int(found[1]), int(found[2])) if found else ()
