"""The CustomResourceDefinition ``rayclusters.ray.io``: compact, and open where KubeRay's spells all of
Kubernetes out.

It takes KubeRay's manifests. Pod templates are left to the API server, which checks the Pods. Fields that
nobody here knows are kept, so that the operator can name them. It installs on Kubernetes 1.20 and later.
"""

from __future__ import annotations

from typing import Any

from everstep.kube import names
from everstep.kube.fields import OPEN, Schema, spec_schema

_TIME: Schema = {"type": "string", "format": "date-time"}


def custom_resource_definition() -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names.PLURAL}.{names.GROUP}",
            "labels": {names.CREATED_BY: names.OPERATOR},
        },
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": "RayClusterList",
                "plural": names.PLURAL,
                "singular": "raycluster",
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _COLUMNS,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "required": ["spec"],
                            "properties": {"spec": spec_schema(), "status": _status()},
                        }
                    },
                }
            ],
        },
    }


_COLUMNS = [
    {"name": "slices", "type": "string", "jsonPath": ".status.slices", "description": "whole / desired"},
    {"name": "desired workers", "type": "integer", "jsonPath": ".status.desiredWorkerReplicas"},
    {"name": "ready workers", "type": "integer", "jsonPath": ".status.readyWorkerReplicas"},
    {"name": "state", "type": "string", "jsonPath": ".status.state"},
    {
        "name": "trouble",
        "type": "string",
        "priority": 1,
        "jsonPath": ".status.groups[*].replicas[*].reason",
        "description": "why replicas aren't ready",
    },
    {"name": "age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]


def _status() -> Schema:
    condition = {
        "type": "object",
        "required": ["type", "status", "reason", "message", "lastTransitionTime"],
        "properties": {
            "type": {"type": "string"},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": {"type": "string"},
            "message": {"type": "string"},
            "observedGeneration": {"type": "integer", "format": "int64"},
            "lastTransitionTime": _TIME,
        },
    }
    return {
        **OPEN,
        "properties": {
            "state": {"type": "string"},
            "slices": {"type": "string"},
            "desiredWorkerReplicas": {"type": "integer"},
            "readyWorkerReplicas": {"type": "integer"},
            "lastUpdateTime": _TIME,
            "conditions": {
                "type": "array",
                "items": condition,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
            "groups": {"type": "array", "items": OPEN},
        },
    }
