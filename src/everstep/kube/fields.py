"""Every field of a RayCluster's spec, once: what its type is, and what this operator does with it.

The definition (``crd``), the check of types (``shape``), what is refused or named as ignored (``validation``)
and the table in the docs (``parity``) are all made from this list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec

from everstep.kube import names

Schema = dict[str, Any]


class Parity(Enum):
    """Beside KubeRay 1.6."""

    SAME = "same"
    DIFFERENT = "different"
    IGNORED = "ignored"
    """Nothing is done with it, which the condition ``UnsupportedField`` says."""
    REFUSED = "refused"
    """It asks for protection that isn't given. A cluster that has it isn't run."""


class Field(msgspec.Struct, frozen=True):
    path: str
    """Below ``spec``; ``[]`` for each item of a list."""
    schema: Schema
    verdict: Parity = Parity.SAME
    why: str = ""
    idle: object = None
    """A value that asks for nothing."""


OPEN: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_SWITCH: Schema = {"type": "boolean"}
_LIST: Schema = {"type": "array", "items": OPEN}
_AMOUNTS: Schema = {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}}
_TEMPLATE: Schema = {
    **OPEN,
    "required": ["spec"],
    "properties": {
        "metadata": OPEN,
        "spec": {
            **OPEN,
            "required": ["containers"],
            "properties": {"containers": {"type": "array", "minItems": 1, "items": OPEN}},
        },
    },
}


def _count(least: int = 0, **more: Any) -> Schema:
    return {"type": "integer", "format": "int32", "minimum": least, **more}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_S, _D, _I, _R = Parity.SAME, Parity.DIFFERENT, Parity.IGNORED, Parity.REFUSED
_HEAD, _GROUP, _SCALER = "headGroupSpec", "workerGroupSpecs[]", "autoscalerOptions"
_NAME: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": 50,
    "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$",
}
_ISOLATE = "make a NetworkPolicy for the Pods with the label ray.io/cluster"
_WHOLE = "replicas of several hosts live and die as one, whatever KubeRay's feature gates say"


def _member(path: str) -> list[Field]:
    return [
        Field(f"{path}.template", _TEMPLATE),
        Field(f"{path}.rayStartParams", {**_TEXTS, "default": {}}, _D, "`block: false` is refused"),
        Field(f"{path}.resources", _AMOUNTS),
        Field(f"{path}.labels", _TEXTS),
    ]


FIELDS: tuple[Field, ...] = (
    Field("rayVersion", _TEXT),
    Field("suspend", _SWITCH),
    Field(
        "managedBy",
        _one_of(names.MANAGED_BY_US, names.MANAGED_BY_KUBERAY, names.MANAGED_BY_KUEUE),
        _D,
        f"a cluster with a value other than `{names.MANAGED_BY_US}` is left alone",
    ),
    Field("enableInTreeAutoscaling", _SWITCH),
    Field("headServiceAnnotations", _TEXTS),
    Field(_HEAD, OPEN),
    *_member(_HEAD),
    Field(f"{_HEAD}.serviceType", _one_of("ClusterIP", "NodePort", "LoadBalancer")),
    Field(f"{_HEAD}.headService", OPEN, _D, "a port of the user's wins over Ray's of the same name"),
    Field(f"{_HEAD}.enableIngress", _SWITCH, _I, "no Ingress is made", False),
    Field("workerGroupSpecs", {"type": "array"}),
    Field(f"{_GROUP}.groupName", _NAME),
    *_member(_GROUP),
    Field(f"{_GROUP}.replicas", _count(default=0)),
    Field(f"{_GROUP}.minReplicas", _count(default=0)),
    Field(f"{_GROUP}.maxReplicas", _count(default=2**31 - 1)),
    Field(f"{_GROUP}.numOfHosts", _count(1, maximum=names.MOST_HOSTS, default=1), _D, _WHOLE),
    Field(f"{_GROUP}.suspend", _SWITCH),
    Field(f"{_GROUP}.idleTimeoutSeconds", _count(), _S),
    Field(f"{_GROUP}.priority", _count(), _S),
    # Ray's autoscaler replaces what is in it, so it must be there.
    Field(f"{_GROUP}.scaleStrategy", {**OPEN, "default": {}}),
    Field(
        f"{_GROUP}.scaleStrategy.workersToDelete",
        {"type": "array", "items": {"type": "string", "minLength": 1}},
        _D,
        "one host that is named takes its replica along",
    ),
    Field(_SCALER, OPEN),
    Field(f"{_SCALER}.version", _one_of("v1", "v2"), _D, "Ray's autoscaler v2, always; `v1` is refused"),
    Field(f"{_SCALER}.upscalingMode", _one_of("Default", "Aggressive", "Conservative")),
    Field(f"{_SCALER}.idleTimeoutSeconds", _count()),
    Field(f"{_SCALER}.image", _TEXT),
    Field(f"{_SCALER}.imagePullPolicy", _TEXT),
    Field(f"{_SCALER}.resources", OPEN),
    Field(f"{_SCALER}.env", _LIST),
    Field(f"{_SCALER}.envFrom", _LIST),
    Field(f"{_SCALER}.volumeMounts", _LIST),
    Field(f"{_SCALER}.securityContext", OPEN),
    Field(f"{_SCALER}.command", {"type": "array", "items": _TEXT}),
    Field(f"{_SCALER}.args", {"type": "array", "items": _TEXT}),
    Field("authOptions", OPEN),
    Field("authOptions.mode", _one_of("disabled", "token")),
    Field("authOptions.secretName", _TEXT),
    Field("authOptions.enableK8sTokenAuth", _SWITCH),
    Field(
        "gcsFaultToleranceOptions",
        OPEN,
        _D,
        "what is kept in Redis isn't removed with the cluster; an event names its namespace there",
    ),
    Field("gcsFaultToleranceOptions.redisAddress", _TEXT),
    Field("gcsFaultToleranceOptions.redisUsername", OPEN),
    Field("gcsFaultToleranceOptions.redisPassword", OPEN),
    Field("gcsFaultToleranceOptions.externalStorageNamespace", _TEXT),
    Field("gcsFaultToleranceOptions.backend", _TEXT, _R, "use Redis: give redisAddress", "redis"),
    Field("gcsFaultToleranceOptions.storage", OPEN, _R, "use Redis: give redisAddress"),
    Field("tlsOptions", OPEN, _R, "set Ray's RAY_USE_TLS and RAY_TLS_* variables in the templates"),
    Field("networkPolicy", OPEN, _R, _ISOLATE),
    Field("networkIsolation", OPEN, _R, _ISOLATE),
    Field("upgradeStrategy", OPEN),
    Field(
        "upgradeStrategy.type",
        _one_of("None", "Recreate"),
        _D,
        f"with the annotation `{names.MAX_UNAVAILABLE}`, replica by replica instead",
    ),
    Field("idleTerminationOptions", OPEN, _I, "an idle cluster is left running"),
    Field("historyServerOptions", OPEN, _I, "no collector is started"),
    Field("idleSuspend", _SWITCH, _I, "an idle cluster is left running", False),
)
BY_PATH: Mapping[str, Field] = {field.path: field for field in FIELDS}

_REQUIRED = {"": ["headGroupSpec"], _HEAD: ["template"], _GROUP: ["groupName", "template"]}


def spec_schema() -> Schema:
    """The schema of ``spec``, open for what isn't listed here, so that it can be named."""
    return _nested("", OPEN)


def _nested(path: str, schema: Schema) -> Schema:
    children = list(_children(path))
    if schema.get("type") == "array" and not children and f"{path}[]" in _parents():
        return {**schema, "items": _nested(f"{path}[]", OPEN)}
    if not children:
        return schema
    properties = {field.path.rpartition(".")[2]: _nested(field.path, field.schema) for field in children}
    required = {"required": _REQUIRED[path]} if path in _REQUIRED else {}
    return {**schema, **required, "properties": properties}


def _children(path: str) -> Iterator[Field]:
    return (field for field in FIELDS if field.path.rpartition(".")[0] == path)


def _parents() -> set[str]:
    return {field.path.rpartition(".")[0] for field in FIELDS}


def found(spec: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """The fields that a spec has, at any depth that is listed here: path, path in the list, value."""
    yield from _found("", "", spec)


def _found(at: str, path: str, value: object) -> Iterator[tuple[str, str, object]]:
    if isinstance(value, Mapping) and path in _parents():
        for key, inside in value.items():
            there = f"{at}.{key}" if at else key
            listed = f"{path}.{key}" if path else key
            yield there, listed, inside
            yield from _found(there, listed, inside)
    elif isinstance(value, list) and f"{path}[]" in _parents():
        for i, inside in enumerate(value):
            yield from _found(f"{at}[{i}]", f"{path}[]", inside)
