"""The definitions that gang schedulers bring along, in our own words and as far as they matter here.

Their schemas are closed: the server drops what they don't list, so what comes back is what the scheduler
would read.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from everstep.testing.kube import ApiServer
from kube.proxy import Proxy

Schema = dict[str, Any]

_COUNT: Schema = {"type": "integer", "format": "int32", "minimum": 1}
_TEXT: Schema = {"type": "string"}
_QUANTITY: Schema = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
_RESOURCES: Schema = {"type": "object", "additionalProperties": _QUANTITY}


def _of(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


SPECS: dict[str, Schema] = {
    "scheduling.x-k8s.io/v1alpha1": _of(
        minMember=_COUNT, minResources=_RESOURCES, scheduleTimeoutSeconds=_COUNT
    ),
    "scheduling.volcano.sh/v1beta1": _of(
        minMember=_COUNT, minResources=_RESOURCES, queue=_TEXT, priorityClassName=_TEXT
    ),
    "scheduling.run.ai/v2alpha2": _of(minMember=_COUNT, queue=_TEXT, priorityClassName=_TEXT),
    "scheduling.test.io/v1alpha2": _of(
        ("schedulingPolicy",),
        schedulingPolicy=_of(basic=_of(), gang=_of(("minCount",), minCount=_COUNT)),
        priorityClassName=_TEXT,
    ),
}
"""What a PodGroup's ``spec`` may hold, by the version of its API."""
KUBERNETES, STAND_IN = b"scheduling.k8s.io/v1alpha2", b"scheduling.test.io/v1alpha2"
"""Kubernetes' own PodGroups, and where they are kept: the group is a server's own, and one that is too old to
have PodGroups in it lets nobody else define them there.
"""


class Renaming(Proxy):
    """Has a server whose own group of APIs has PodGroups, as far as its client can see."""

    def path_of(self, raw: web.Request) -> str:
        return raw.path_qs.replace(KUBERNETES.decode(), STAND_IN.decode())

    async def body_of(self, raw: web.Request) -> bytes:
        return (await raw.read()).replace(KUBERNETES, STAND_IN)

    def answered(self, line: bytes) -> bytes:
        return line.replace(STAND_IN, KUBERNETES)


def definition(api: str) -> dict[str, Any]:
    group, _, version = api.partition("/")
    schema = _of(spec=SPECS[api], status={"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    # The server wants to know who has agreed to names that end like Kubernetes' own.
    agreed = {"api-approved.kubernetes.io": "unapproved, a definition of a test"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"podgroups.{group}", "annotations": agreed},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": "PodGroup", "plural": "podgroups"},
            "versions": [served],
        },
    }


def install(server: ApiServer) -> None:
    for api in SPECS:
        server.define(definition(api))
