"""What a RayCluster must be like, said with the field's path and what to do.

The webhook refuses what has problems; where there is no webhook, the operator leaves such a cluster alone and
says the same in its status. What the CRD's schema already refuses is checked again here, since another CRD
may be installed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from everstep.kube import fields, gangs, names, quantities
from everstep.kube.containers import version
from everstep.kube.shape import misshapen
from everstep.kube.spec import RestartPolicy, Upgrade

_NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_GROUP_NAME = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$")
_FLAG = re.compile(r"^[a-z][a-z0-9-]*$")
_LABEL_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
_PORT = re.compile(r"^[0-9]{1,5}$")
_TOPOLOGY = re.compile(r"^[0-9]{1,5}(x[0-9]{1,5}){1,2}$")
_PORTS = ("port", "dashboard-port", "ray-client-server-port", "metrics-export-port")
_TOKENS_SINCE = (2, 52)
_LONGEST_CLUSTER = 50
_LONGEST_GROUP = 50
_OURS = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_NAME")
_RESERVED_LABELS = (
    names.CLUSTER,
    names.NODE_TYPE,
    names.WORKER_GROUP,
    names.REPLICA_INDEX,
    names.REPLICA_NAME,
    names.HOST_INDEX,
)

# What KubeRay and others read from a cluster's annotations and labels, like ray.io/ft-enabled.
_OF_RAY_AND_KUEUE = ("ray.io/", "kueue.x-k8s.io/", "yunikorn.apache.org/", "volcano.sh/", "kai.scheduler/")
_HONOURED = (
    names.OVERWRITE_COMMAND,
    names.CLUSTER,
    names.FT_ENABLED,
    names.STORAGE_NAMESPACE,
    gangs.LABEL,
    *gangs.QUEUES,
    # Kueue reads it, and suspends and resumes the cluster by it.
    "kueue.x-k8s.io/queue-name",
    "kueue.x-k8s.io/priority-class",
)


class Problem(msgspec.Struct, frozen=True):
    path: str
    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.seen}; {self.remedy}"


def problems(raw: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[Problem]:
    """All that is wrong with a RayCluster, in the order of its fields. ``before`` is what it replaces."""
    wrong = misshapen(raw)
    if wrong is not None:
        return [Problem(*wrong, "give it as in Kubernetes' own reference of RayClusters and Pods")]
    return list(_problems(raw, before))


def unsupported(raw: Mapping[str, Any]) -> list[str]:
    """The paths of fields that are there and that this operator does nothing with."""
    paths = [
        f"metadata.{kind}[{key}]"
        for kind in ("annotations", "labels")
        for key in (raw.get("metadata") or {}).get(kind) or ()
        if key.startswith(_OF_RAY_AND_KUEUE) and key not in _HONOURED
    ]
    for path, listed, value in fields.found(raw.get("spec") or {}):
        field = fields.BY_PATH.get(listed)
        if field is None or (field.verdict is fields.Parity.IGNORED and value != field.idle):
            paths.append(f"spec.{path}")
    service = ((raw.get("spec") or {}).get("headGroupSpec") or {}).get("headService") or {}
    known = ("labels", "annotations", "creationTimestamp", "name", "namespace")
    paths += [
        f"spec.headGroupSpec.headService.metadata.{key}"
        for key in service.get("metadata") or ()
        if key not in known
    ]
    return paths


def _refused(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """What asks for protection that isn't given: a cluster without it isn't the one that was asked for."""
    for path, listed, value in fields.found(spec):
        field = fields.BY_PATH.get(listed)
        if field is not None and field.verdict is fields.Parity.REFUSED and value not in (None, field.idle):
            yield Problem(f"spec.{path}", "isn't supported, and it protects something", field.why)


def _problems(raw: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[Problem]:
    name = (raw.get("metadata") or {}).get("name", "")
    if not _NAME.match(name):
        yield Problem(
            "metadata.name",
            f"{name!r} can't be the start of a Service's name",
            "use lower-case letters, digits and dashes, beginning with a letter",
        )
    elif len(name) > _LONGEST_CLUSTER:
        yield Problem("metadata.name", f"{len(name)} characters", f"use at most {_LONGEST_CLUSTER}")
    yield from _restart_policy("metadata", raw.get("metadata") or {})
    spec = raw.get("spec")
    if spec is None:
        yield Problem("spec", "is missing", "give headGroupSpec and workerGroupSpecs")
        return
    yield from _refused(spec)
    yield from _managed_by(spec, before)
    yield from _fault_tolerance(raw, spec)
    yield from _upgrade(raw, spec)
    yield from _auth(spec)
    autoscaling = bool(spec.get("enableInTreeAutoscaling"))
    yield from _autoscaler(spec, autoscaling)
    head = spec.get("headGroupSpec")
    if head is None:
        yield Problem(
            "spec.headGroupSpec", "is missing", "give the head's Pod template in headGroupSpec.template"
        )
    else:
        yield from _member("spec.headGroupSpec", head, autoscaling, is_head=True)
    taken: dict[str, int] = {}
    for i, group in enumerate(spec.get("workerGroupSpecs") or ()):
        path = f"spec.workerGroupSpecs[{i}]"
        yield from _group_name(path, group, taken, i)
        yield from _counts(path, group)
        yield from _member(path, group, autoscaling, is_head=False)
        yield from _hosts(path, group)
        if autoscaling and group.get("suspend"):
            yield Problem(
                f"{path}.suspend",
                "true, while the autoscaler decides how many workers there are",
                "set enableInTreeAutoscaling: false, or maxReplicas: 0 for this group",
            )


def _managed_by(spec: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[Problem]:
    given = spec.get("managedBy")
    known = (names.MANAGED_BY_US, names.MANAGED_BY_KUBERAY, names.MANAGED_BY_KUEUE)
    if given is not None and given not in known:
        yield Problem(
            "spec.managedBy", f"{given!r} is unknown", f"leave it out, or use one of {', '.join(known)}"
        )
    if before is not None and (before.get("spec") or {}).get("managedBy") != given:
        was = (before.get("spec") or {}).get("managedBy")
        yield Problem(
            "spec.managedBy",
            f"changed from {was!r} to {given!r}",
            "it can't change while the cluster lives: delete the cluster and make it anew",
        )


def _fault_tolerance(raw: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[Problem]:
    path = "spec.gcsFaultToleranceOptions"
    options = spec.get("gcsFaultToleranceOptions")
    annotations = (raw.get("metadata") or {}).get("annotations") or {}
    head = spec.get("headGroupSpec") or {}
    if options is None:
        return
    if not options.get("redisAddress"):
        yield Problem(f"{path}.redisAddress", "is missing", "give Redis' address, like redis:6379")
    if annotations.get(names.FT_ENABLED, "true").lower() != "true":
        yield Problem(
            f"metadata.annotations[{names.FT_ENABLED}]",
            f"{annotations[names.FT_ENABLED]!r} beside gcsFaultToleranceOptions",
            "leave the annotation out",
        )
    containers = ((head.get("template") or {}).get("spec") or {}).get("containers") or [{}]
    said = {variable.get("name") for variable in containers[0].get("env") or ()}
    for name in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"):
        if name in said:
            yield Problem(
                "spec.headGroupSpec.template.spec.containers[0].env",
                f"{name} is set beside gcsFaultToleranceOptions",
                f"say it in {path} alone",
            )
    for flag in ("redis-password", "redis-username"):
        if flag in (head.get("rayStartParams") or {}):
            yield Problem(
                f"spec.headGroupSpec.rayStartParams.{flag}",
                "is set beside gcsFaultToleranceOptions",
                f"say it in {path} alone",
            )


def _upgrade(raw: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[Problem]:
    kind = (spec.get("upgradeStrategy") or {}).get("type")
    if kind not in (None, *(upgrade.value for upgrade in (Upgrade.NONE, Upgrade.RECREATE))):
        yield Problem("spec.upgradeStrategy.type", f"{kind!r} is unknown", "use None or Recreate")
    annotations = (raw.get("metadata") or {}).get("annotations") or {}
    for name in (names.MAX_UNAVAILABLE, names.PLACEMENT_TIMEOUT):
        given = annotations.get(name)
        if given is not None and not re.match(r"^[1-9][0-9]{0,4}$", given):
            yield Problem(f"metadata.annotations[{name}]", f"{given!r}", "use a whole number, 1 or more")


def _auth(spec: Mapping[str, Any]) -> Iterator[Problem]:
    options = spec.get("authOptions") or {}
    mode = options.get("mode")
    if mode not in (None, "disabled", "token"):
        yield Problem("spec.authOptions.mode", f"{mode!r} is unknown", "use token, or disabled")
    if mode == "token" and () < version(spec.get("rayVersion") or "") < _TOKENS_SINCE:
        yield Problem("spec.rayVersion", f"{spec['rayVersion']!r} knows no tokens", "use Ray 2.52 or later")
    if options.get("enableK8sTokenAuth") and options.get("secretName"):
        yield Problem(
            "spec.authOptions.secretName", "is set beside enableK8sTokenAuth", "choose one of the two"
        )


def _autoscaler(spec: Mapping[str, Any], autoscaling: bool) -> Iterator[Problem]:
    options = spec.get("autoscalerOptions") or {}
    version = options.get("version")
    if autoscaling and version not in (None, "v2"):
        yield Problem(
            "spec.autoscalerOptions.version",
            f"{version!r} isn't supported",
            "use v2, Ray's own autoscaler since 2.10",
        )
    mode = options.get("upscalingMode")
    if mode not in (None, "Default", "Aggressive", "Conservative"):
        yield Problem(
            "spec.autoscalerOptions.upscalingMode",
            f"{mode!r} is unknown",
            "use Default, Aggressive or Conservative",
        )
    idle = options.get("idleTimeoutSeconds")
    if idle is not None and (not isinstance(idle, int) or idle < 0):
        yield Problem(
            "spec.autoscalerOptions.idleTimeoutSeconds",
            f"{idle!r}",
            "use a whole number of seconds, 0 or more",
        )


def _group_name(path: str, group: Mapping[str, Any], taken: dict[str, int], i: int) -> Iterator[Problem]:
    name = group.get("groupName")
    if not name:
        yield Problem(f"{path}.groupName", "is missing", "name the group; Pods and hosts are named after it")
        return
    if not _GROUP_NAME.match(name):
        yield Problem(
            f"{path}.groupName",
            f"{name!r} can't be part of a host name",
            "use letters, digits and dashes, beginning and ending with a letter or digit",
        )
    elif len(name) > _LONGEST_GROUP:
        yield Problem(f"{path}.groupName", f"{len(name)} characters", f"use at most {_LONGEST_GROUP}")
    elif name == names.HEAD_GROUP:
        yield Problem(f"{path}.groupName", f"{name!r} is the head's own group", "use another name")
    host = name.lower()  # as it is in host names
    if host in taken:
        yield Problem(
            f"{path}.groupName",
            f"{name!r} is also the name of spec.workerGroupSpecs[{taken[host]}]",
            "give each group a name of its own, in capitals or not",
        )
    taken.setdefault(host, i)


def _counts(path: str, group: Mapping[str, Any]) -> Iterator[Problem]:
    for key, least in (("replicas", 0), ("minReplicas", 0), ("maxReplicas", 0), ("numOfHosts", 1)):
        value = group.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            yield Problem(f"{path}.{key}", f"{value!r}", f"use a whole number, {least} or more")
            return
    if (group.get("numOfHosts") or 1) > names.MOST_HOSTS:
        yield Problem(f"{path}.numOfHosts", f"{group['numOfHosts']}", f"use at most {names.MOST_HOSTS}")
    low, high = group.get("minReplicas"), group.get("maxReplicas")
    if low is not None and high is not None and low > high:
        yield Problem(
            f"{path}.maxReplicas",
            f"{high} is below minReplicas, {low}",
            f"use at least {low}, or lower minReplicas",
        )
    named = (group.get("scaleStrategy") or {}).get("workersToDelete") or ()
    for k, pod in enumerate(named):
        if not isinstance(pod, str) or not pod:
            yield Problem(f"{path}.scaleStrategy.workersToDelete[{k}]", f"{pod!r}", "give the name of a Pod")


def _member(path: str, member: Mapping[str, Any], autoscaling: bool, *, is_head: bool) -> Iterator[Problem]:
    template = member.get("template") or {}
    containers = (template.get("spec") or {}).get("containers")
    if not containers:
        yield Problem(
            f"{path}.template.spec.containers",
            "is empty",
            "give at least one container; the first one runs Ray",
        )
        return
    if not containers[0].get("image"):
        yield Problem(
            f"{path}.template.spec.containers[0].image",
            "is missing",
            "name an image with Ray, like rayproject/ray",
        )
    meta = template.get("metadata") or {}
    for key in _RESERVED_LABELS:
        if key in (meta.get("labels") or {}):
            yield Problem(
                f"{path}.template.metadata.labels[{key}]", "is set", "leave it out: the operator sets it"
            )
    yield from _restart_policy(f"{path}.template.metadata", meta)
    yield from _start_params(path, member, is_head=is_head)
    yield from _resources(path, member, containers[0], autoscaling)
    restart = (template.get("spec") or {}).get("restartPolicy")
    if autoscaling and restart not in (None, "Never"):
        yield Problem(
            f"{path}.template.spec.restartPolicy",
            f"{restart!r}, while Ray's autoscaler counts on Pods that don't restart",
            "use Never, or leave it out",
        )


def _restart_policy(path: str, meta: Mapping[str, Any]) -> Iterator[Problem]:
    policy = (meta.get("annotations") or {}).get(names.RESTART_POLICY)
    if policy is not None and policy not in [p.value for p in RestartPolicy]:
        yield Problem(
            f"{path}.annotations[{names.RESTART_POLICY}]",
            f"{policy!r} is unknown",
            "use Replica or Container",
        )


def _start_params(path: str, member: Mapping[str, Any], *, is_head: bool) -> Iterator[Problem]:
    params = member.get("rayStartParams") or {}
    for key, value in params.items():
        if not _FLAG.match(key):
            yield Problem(
                f"{path}.rayStartParams.{key}",
                "isn't a flag of ray start",
                f"write it without dashes: {key.lstrip('-')}",
            )
        elif not isinstance(value, str):
            yield Problem(
                f"{path}.rayStartParams.{key}", f"{value!r} isn't text", f'put it in quotes: "{value}"'
            )
    if params.get("block", "true") != "true":
        yield Problem(
            f"{path}.rayStartParams.block",
            f"{params['block']!r}",
            "leave it out: a container lives as long as ray start does",
        )
    if not is_head and "address" in params:
        yield Problem(
            f"{path}.rayStartParams.address", "is set", "leave it out: the operator gives the head's address"
        )
    if "labels" in params:
        yield Problem(
            f"{path}.rayStartParams.labels",
            "is set",
            f"move it to {path}.labels, where the autoscaler sees it, too",
        )
    for key in _PORTS if is_head else _PORTS[-1:]:
        port = params.get(key)
        if isinstance(port, str) and not (_PORT.match(port) and int(port) < 65536):
            yield Problem(f"{path}.rayStartParams.{key}", f"{port!r}", "use a port number, like 6379")
    yield from _labels(path, member)


def _labels(path: str, member: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in (member.get("labels") or {}).items():
        if not _LABEL_KEY.match(key) or not isinstance(value, str) or not _LABEL_VALUE.match(value):
            yield Problem(
                f"{path}.labels[{key}]",
                f"{value!r} isn't a label",
                "use letters, digits, dashes, dots and underscores, at most 63",
            )


def _resources(
    path: str, member: Mapping[str, Any], container: Mapping[str, Any], autoscaling: bool
) -> Iterator[Problem]:
    given = member.get("resources") or {}
    params = member.get("rayStartParams") or {}
    asked = quantities.asked(container)
    limits = f"{path}.template.spec.containers[0].resources"
    for where, amounts in ((f"{path}.resources", given), (limits, asked)):
        for key, value in amounts.items():
            if not quantities.is_quantity(value):
                yield Problem(f"{where}.{key}", f"{value!r} isn't a quantity", "use a number, like 4 or 16Gi")
    doubled = [key for key in ("num-cpus", "num-gpus", "memory", "resources") if key in params]
    if given and doubled:
        yield Problem(
            f"{path}.rayStartParams.{doubled[0]}",
            "is set beside resources",
            f"say it in one of the two: {path}.resources is the newer",
        )
    if autoscaling and "CPU" not in given and "num-cpus" not in params and "cpu" not in asked:
        yield Problem(
            f"{path}.template.spec.containers[0].resources.limits.cpu",
            "is missing, and Ray's autoscaler must know the CPUs of a node",
            f"give it, or {path}.rayStartParams.num-cpus",
        )


def _hosts(path: str, group: Mapping[str, Any]) -> Iterator[Problem]:
    spec = (group.get("template") or {}).get("spec") or {}
    containers = spec.get("containers") or []
    hosts = group.get("numOfHosts") or 1
    if not containers or not isinstance(hosts, int):
        return
    if hosts > 1:
        yield from _same_for_all(path, spec, containers[0])
    yield from _topology_request(path, group, hosts)
    topology = (spec.get("nodeSelector") or {}).get(names.TPU_TOPOLOGY_SELECTOR)
    chips = quantities.asked(containers[0]).get(names.TPU_RESOURCE)
    where = f"{path}.template.spec.nodeSelector[{names.TPU_TOPOLOGY_SELECTOR}]"
    if topology is None:
        if hosts > 1 and chips is not None:
            yield Problem(where, "is missing in a group of TPU hosts", "name the slices' topology, like 4x4")
    elif not _TOPOLOGY.match(topology):
        yield Problem(where, f"{topology!r} isn't a topology", "use one like 4x4 or 2x2x2")
    elif chips is not None and quantities.is_quantity(chips):
        yield from _chips(path, hosts, topology, quantities.rounded_up(chips))


def _topology_request(path: str, group: Mapping[str, Any], hosts: int) -> Iterator[Problem]:
    """What Kueue puts together must be what lives together."""
    annotations = ((group.get("template") or {}).get("metadata") or {}).get("annotations") or {}
    size = annotations.get(names.KUEUE_SLICE_SIZE)
    if size is not None and size != str(hosts):
        yield Problem(
            f"{path}.template.metadata.annotations[{names.KUEUE_SLICE_SIZE}]",
            f"{size!r}, but a replica has {hosts} hosts",
            f'use "{hosts}", so that each replica gets one topology domain',
        )


def _same_for_all(path: str, spec: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[Problem]:
    """What each host of a replica must have for itself."""
    for key in ("hostname", "subdomain"):
        if spec.get(key):
            yield Problem(
                f"{path}.template.spec.{key}",
                f"{spec[key]!r}, the same for all hosts of a replica",
                "leave it out: each host gets a name of its own",
            )
    for k, variable in enumerate(container.get("env") or ()):
        if variable.get("name") in _OURS:
            yield Problem(
                f"{path}.template.spec.containers[0].env[{k}]",
                f"{variable['name']} is the same for all hosts of a replica",
                "leave it out: the operator sets it for each host",
            )


def _chips(path: str, hosts: int, topology: str, per_host: int) -> Iterator[Problem]:
    total = math.prod(int(side) for side in topology.split("x"))
    if per_host < 1 or total % per_host:
        yield Problem(
            f"{path}.template.spec.containers[0].resources.limits[{names.TPU_RESOURCE}]",
            f"{per_host} chips a host don't divide the {total} of topology {topology}",
            "use the chips that one host has, usually 4",
        )
    elif hosts != total // per_host:
        yield Problem(
            f"{path}.numOfHosts",
            f"{hosts}, while topology {topology} has {total} chips, {per_host} a host",
            f"use numOfHosts: {total // per_host}",
        )
