"""Manifests that nobody should get through, each with the path that is named and a word of the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kube.world import group, manifest

Raw = dict[str, Any]

TPU = {
    "nodeSelector": {
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    }
}


def good() -> Raw:
    made = manifest(group())
    made["metadata"] = {"name": "demo", "annotations": {"everstep.dev/managed": "true"}}
    return made


def _first(raw: Raw) -> Raw:
    found: Raw = raw["spec"]["workerGroupSpecs"][0]
    return found


def _container(raw: Raw) -> Raw:
    found: Raw = _first(raw)["template"]["spec"]["containers"][0]
    return found


def _changed(**fields: Any) -> Callable[[Raw], None]:
    return lambda raw: _first(raw).update(fields)


def _tpu(chips: int, hosts: int, topology: str | None = "4x4") -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        _first(raw)["numOfHosts"] = hosts
        _container(raw)["resources"] = {"limits": {"google.com/tpu": chips}}
        if topology is not None:
            _first(raw)["template"]["spec"]["nodeSelector"] = {"cloud.google.com/gke-tpu-topology": topology}

    return change


def _autoscaling(**more: Any) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        raw["spec"]["enableInTreeAutoscaling"] = True
        for member in (raw["spec"]["headGroupSpec"], _first(raw)):
            member["rayStartParams"] = {"num-cpus": "1"}
        raw["spec"].update(more)

    return change


def _both(*changes: Callable[[Raw], Any]) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        for one in changes:
            one(raw)

    return change


def _annotated(key: str, value: str) -> Callable[[Raw], None]:
    return lambda raw: _first(raw)["template"].update(metadata={"annotations": {key: value}})


G = "spec.workerGroupSpecs[0]"
BAD: dict[str, tuple[Callable[[Raw], Any], str, str]] = {
    "a name that no Service can have": (
        lambda r: r["metadata"].update(name="2demo"),
        "metadata.name",
        "letter",
    ),
    "a name that is too long": (lambda r: r["metadata"].update(name="x" * 51), "metadata.name", "at most 50"),
    "no head": (lambda r: r["spec"].pop("headGroupSpec"), "spec.headGroupSpec", "template"),
    "a head without containers": (
        lambda r: r["spec"]["headGroupSpec"]["template"]["spec"].update(containers=[]),
        "spec.headGroupSpec.template.spec.containers",
        "at least one",
    ),
    "a group without a name": (lambda r: _first(r).pop("groupName"), f"{G}.groupName", "name the group"),
    "a group's name that no host can have": (_changed(groupName="tpu_v6"), f"{G}.groupName", "dashes"),
    "the head's own name for a group": (_changed(groupName="headgroup"), f"{G}.groupName", "another name"),
    "two groups of one name": (
        lambda r: r["spec"]["workerGroupSpecs"].append(group("TPU")),
        "spec.workerGroupSpecs[1].groupName",
        "of its own",
    ),
    "fewer than no replicas": (_changed(replicas=-1), f"{G}.replicas", "0 or more"),
    "a maximum below the minimum": (_changed(minReplicas=3, maxReplicas=2), f"{G}.maxReplicas", "at least 3"),
    "replicas without hosts": (_changed(numOfHosts=0), f"{G}.numOfHosts", "1 or more"),
    "a container without an image": (
        lambda r: _container(r).pop("image"),
        f"{G}.template.spec.containers[0].image",
        "name an image",
    ),
    "hosts that don't fit the topology": (_tpu(4, 2), f"{G}.numOfHosts", "numOfHosts: 4"),
    "chips that don't divide the topology": (_tpu(3, 4), "google.com/tpu", "usually 4"),
    "TPU hosts of no topology": (_tpu(4, 4, None), "gke-tpu-topology", "like 4x4"),
    "a topology that is none": (_tpu(4, 4, "four by four"), "gke-tpu-topology", "like 4x4"),
    "a topology domain for half a replica": (
        _annotated("kueue.x-k8s.io/podset-slice-size", "2"),
        f"{G}.template.metadata.annotations[kueue.x-k8s.io/podset-slice-size]",
        'use "4"',
    ),
    "one host name for all": (
        lambda r: _first(r)["template"]["spec"].update(hostname="me"),
        f"{G}.template.spec.hostname",
        "leave it out",
    ),
    "one worker id for all": (
        lambda r: _container(r).update(env=[{"name": "TPU_WORKER_ID", "value": "0"}]),
        f"{G}.template.spec.containers[0].env[0]",
        "leave it out",
    ),
    "a label that is ours": (
        lambda r: _first(r)["template"].update(metadata={"labels": {"ray.io/group": "x"}}),
        f"{G}.template.metadata.labels[ray.io/group]",
        "leave it out",
    ),
    "a flag with dashes": (
        _changed(rayStartParams={"--num-cpus": "1"}),
        f"{G}.rayStartParams.--num-cpus",
        "num-cpus",
    ),
    "a ray start that doesn't stay": (
        _changed(rayStartParams={"block": "false"}),
        f"{G}.rayStartParams.block",
        "leave it out",
    ),
    "another head's address": (
        _changed(rayStartParams={"address": "x:1"}),
        f"{G}.rayStartParams.address",
        "leave it out",
    ),
    "labels where the autoscaler doesn't look": (
        _changed(rayStartParams={"labels": "a=b"}),
        f"{G}.rayStartParams.labels",
        f"{G}.labels",
    ),
    "resources said twice": (
        _changed(resources={"CPU": "4"}, rayStartParams={"num-cpus": "4"}),
        f"{G}.rayStartParams.num-cpus",
        "one of the two",
    ),
    "a resource that is no number": (_changed(resources={"CPU": "many"}), f"{G}.resources.CPU", "a number"),
    "an unknown restart policy": (
        _annotated("everstep.dev/restart-policy", "Never"),
        "everstep.dev/restart-policy",
        "Replica or Container",
    ),
    "the old autoscaler": (
        _autoscaling(autoscalerOptions={"version": "v1"}),
        "spec.autoscalerOptions.version",
        "v2",
    ),
    "an unknown way to scale up": (
        _autoscaling(autoscalerOptions={"upscalingMode": "Wild"}),
        "spec.autoscalerOptions.upscalingMode",
        "Aggressive",
    ),
    "a suspended group that is scaled": (
        _both(_autoscaling(), _changed(suspend=True)),
        f"{G}.suspend",
        "maxReplicas: 0",
    ),
    "Pods that restart under the autoscaler": (
        _both(_autoscaling(), lambda r: _first(r)["template"]["spec"].update(restartPolicy="Always")),
        f"{G}.template.spec.restartPolicy",
        "Never",
    ),
    "CPUs that the autoscaler can't know": (
        _both(_autoscaling(), _changed(rayStartParams={})),
        f"{G}.template.spec.containers[0].resources.limits.cpu",
        "num-cpus",
    ),
    "CPUs that are no number": (
        lambda r: _container(r).update(resources={"limits": {"cpu": "many"}}),
        f"{G}.template.spec.containers[0].resources.cpu",
        "a number",
    ),
    "variables that are no list": (
        lambda r: _container(r).update(env="HOME=/"),
        f"{G}.template.spec.containers[0].env",
        "reference",
    ),
    "a topology of no TPUs that is none": (
        lambda r: _first(r)["template"]["spec"].update(
            nodeSelector={"cloud.google.com/gke-tpu-topology": "big"}
        ),
        "gke-tpu-topology",
        "like 4x4",
    ),
    "a restart policy for all groups that is none": (
        lambda r: r["metadata"]["annotations"].update({"everstep.dev/restart-policy": "Never"}),
        "metadata.annotations[everstep.dev/restart-policy]",
        "Replica or Container",
    ),
    "a dashboard at no port": (
        lambda r: r["spec"]["headGroupSpec"].update(rayStartParams={"dashboard-port": "http"}),
        "spec.headGroupSpec.rayStartParams.dashboard-port",
        "port number",
    ),
    "a network that is to be closed": (
        lambda r: r["spec"].update(networkPolicy={"mode": "DenyAll"}),
        "spec.networkPolicy",
        "NetworkPolicy",
    ),
    "traffic that is to be encrypted": (
        lambda r: r["spec"].update(tlsOptions={"enabled": True}),
        "spec.tlsOptions",
        "RAY_USE_TLS",
    ),
    "somebody unknown in charge": (
        lambda r: r["spec"].update(managedBy="me"),
        "spec.managedBy",
        "leave it out",
    ),
}

BY_SCHEMA = {
    "no head",
    "a head without containers",
    "a group without a name",
    "a group's name that no host can have",
    "fewer than no replicas",
    "replicas without hosts",
    "an unknown way to scale up",
    "somebody unknown in charge",
}
"""What the CRD's schema refuses before the webhook is asked."""


def bad(what: str) -> tuple[Raw, str, str]:
    change, path, remedy = BAD[what]
    raw = copy.deepcopy(good())
    change(raw)
    return raw, path, remedy
