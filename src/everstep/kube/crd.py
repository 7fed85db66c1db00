"""The CustomResourceDefinition ``rayclusters.ray.io``: compact, and open where KubeRay's spells all of
Kubernetes out.

It takes KubeRay's manifests. Pod templates are left to the API server, which checks the Pods. Fields that
nobody here knows are kept, so that the operator can name them. It installs on Kubernetes 1.20 and later.
"""

from __future__ import annotations

from typing import Any

from everstep.kube import names

Schema = dict[str, Any]

_OPEN: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
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
                            "properties": {"spec": _spec(), "status": _status()},
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


def _count(least: int = 0, **more: Any) -> Schema:
    return {"type": "integer", "format": "int32", "minimum": least, **more}


def _spec() -> Schema:
    member = {
        "template": {
            **_OPEN,
            "required": ["spec"],
            "properties": {
                "metadata": _OPEN,
                "spec": {
                    **_OPEN,
                    "required": ["containers"],
                    "properties": {"containers": {"type": "array", "minItems": 1, "items": _OPEN}},
                },
            },
        },
        "rayStartParams": {**_TEXTS, "default": {}},
        "resources": {
            "type": "object",
            "additionalProperties": {"x-kubernetes-int-or-string": True},
        },
        "labels": _TEXTS,
    }
    name = {
        "type": "string",
        "minLength": 1,
        "maxLength": 50,
        "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$",
    }
    group = {
        **_OPEN,
        "required": ["groupName", "template"],
        "properties": {
            **member,
            "groupName": name,
            "replicas": _count(default=0),
            "minReplicas": _count(default=0),
            "maxReplicas": _count(default=2**31 - 1),
            "numOfHosts": _count(1, maximum=names.MOST_HOSTS, default=1),
            "suspend": {"type": "boolean"},
            "idleTimeoutSeconds": _count(),
            # Ray's autoscaler replaces it, so it must be there.
            "scaleStrategy": {
                **_OPEN,
                "default": {},
                "properties": {
                    "workersToDelete": {"type": "array", "items": {"type": "string", "minLength": 1}}
                },
            },
        },
    }
    head = {
        **_OPEN,
        "required": ["template"],
        "properties": {
            **member,
            "serviceType": {"type": "string", "enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            "headService": _OPEN,
            "enableIngress": {"type": "boolean"},
        },
    }
    autoscaler = {
        **_OPEN,
        "properties": {
            "version": {"type": "string", "enum": ["v1", "v2"]},
            "upscalingMode": {"type": "string", "enum": ["Default", "Aggressive", "Conservative"]},
            "idleTimeoutSeconds": _count(),
            "image": {"type": "string"},
        },
    }
    return {
        **_OPEN,
        "required": ["headGroupSpec"],
        "properties": {
            "rayVersion": {"type": "string"},
            "suspend": {"type": "boolean"},
            "managedBy": {
                "type": "string",
                "enum": [names.MANAGED_BY_US, names.MANAGED_BY_KUBERAY, names.MANAGED_BY_KUEUE],
            },
            "enableInTreeAutoscaling": {"type": "boolean"},
            "autoscalerOptions": autoscaler,
            "headServiceAnnotations": _TEXTS,
            "headGroupSpec": head,
            "workerGroupSpecs": {"type": "array", "items": group},
        },
    }


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
        **_OPEN,
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
            "groups": {"type": "array", "items": _OPEN},
        },
    }
