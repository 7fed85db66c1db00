"""Whether what the operator reads of a RayCluster is of the right type.

Pod templates are open in the definition, so that anything may be in there. What is read of it is of the right
kind, or the cluster is refused; what isn't read is left to the API server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everstep.kube.fields import OPEN, Schema, spec_schema

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}


def _object(**properties: Schema) -> Schema:
    return {**OPEN, "properties": properties}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_AMOUNTS: Schema = {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}}
_META = _object(name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS, finalizers=_list(_TEXT))
_VARIABLE = {**_object(name=_TEXT, value=_TEXT, valueFrom=OPEN), "required": ["name"]}
_CONTAINER = _object(
    name=_TEXT,
    image=_TEXT,
    imagePullPolicy=_TEXT,
    command=_list(_TEXT),
    args=_list(_TEXT),
    env=_list(_VARIABLE),
    envFrom=_list(OPEN),
    ports=_list({**_object(containerPort=_WHOLE, name=_TEXT, protocol=_TEXT), "required": ["containerPort"]}),
    resources=_object(limits=_AMOUNTS, requests=_AMOUNTS),
    volumeMounts=_list(_object(name=_TEXT, mountPath=_TEXT)),
    securityContext=OPEN,
)
_POD = _object(
    containers=_list(_CONTAINER),
    initContainers=_list(_CONTAINER),
    volumes=_list(_object(name=_TEXT)),
    nodeSelector=_TEXTS,
    hostname=_TEXT,
    subdomain=_TEXT,
    restartPolicy=_TEXT,
    serviceAccountName=_TEXT,
)
_SERVICE = _object(
    metadata=_META,
    spec=_object(
        type=_TEXT,
        ports=_list({**_object(port=_WHOLE, name=_TEXT), "required": ["port"]}),
        publishNotReadyAddresses={"type": "boolean"},
    ),
)
_INSIDE: dict[str, Schema] = {
    "template": _object(metadata=_META, spec=_POD),
    "headService": _SERVICE,
    "env": _list(_VARIABLE),
    "workersToDelete": _list({}),
    "redisUsername": _object(value=_TEXT, valueFrom=OPEN),
    "redisPassword": _object(value=_TEXT, valueFrom=OPEN),
}
"""What is read deeper down than the list of fields goes, by the field's name."""
_LOOSE = ("rayStartParams", "labels", "resources", "replicas", "minReplicas", "maxReplicas", "numOfHosts")
"""``validation`` has more to say about these."""


def _deepened(schema: Schema) -> Schema:
    """With what is inside, and without what must be there: ``validation`` says that better."""
    properties = {}
    for key, inside in (schema.get("properties") or {}).items():
        if key in _LOOSE:
            properties[key] = OPEN if inside.get("type") == "object" else {}
        else:
            properties[key] = _INSIDE.get(key) or _deepened(inside)
    deeper = {key: value for key, value in schema.items() if key != "required"}
    if properties:
        deeper["properties"] = properties
    if "items" in schema:
        deeper["items"] = _deepened(schema["items"])
    return deeper


_SCHEMA = _object(metadata=_META, spec=_deepened(spec_schema()))


def misshapen(raw: object) -> tuple[str, str] | None:
    """The path of the first field that is of the wrong kind, and what is wrong with it."""
    return next(_wrong("", raw, _SCHEMA), None)


def _wrong(path: str, value: Any, schema: Schema) -> Iterator[tuple[str, str]]:
    if value is None or not schema:
        return  # to Kubernetes a null is a field that isn't there
    expected = _expected(schema)
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in (*expected, object)):
        kind = schema.get("type") or "number or text"
        yield path or "metadata", f"{value!r} is a {type(value).__name__}, not a {kind}"[:300]
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if item is None:
                yield f"{path}[{i}]", "is null"
            yield from _wrong(f"{path}[{i}]", item, schema.get("items") or {})
    elif isinstance(value, dict):
        yield from _wrong_inside(path, value, schema)


def _expected(schema: Schema) -> tuple[type, ...]:
    if schema.get("x-kubernetes-int-or-string"):
        return (str, int, float)
    return _TYPES.get(schema.get("type", ""), (object,))


def _wrong_inside(path: str, value: dict[str, Any], schema: Schema) -> Iterator[tuple[str, str]]:
    properties, other = schema.get("properties") or {}, schema.get("additionalProperties") or {}
    for key, inside in value.items():
        yield from _wrong(f"{path}.{key}" if path else str(key), inside, properties.get(key) or other)
    for key in schema.get("required") or ():
        if value.get(key) is None:
            yield f"{path}.{key}", "is missing"
