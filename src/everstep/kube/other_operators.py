"""Other operators that manage RayClusters here. The operator never fights KubeRay."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from everstep.kube import names
from everstep.kube.api import Api, ApiError, clusters_path, patiently
from everstep.kube.operator import OperatorSettings

logger = logging.getLogger("everstep.kube")

CRD_PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.PLURAL}.{names.GROUP}"
_KUBERAY = "kuberay-operator"


class OperatorRefused(Exception):
    """The operator can't, or must not, run here. Says what to do."""


async def check(api: Api, settings: OperatorSettings) -> None:
    await patiently(lambda: _check_resource(api, settings))
    await patiently(lambda: _check_kuberay(api, settings))


async def foreign_definition(api: Api) -> str | None:
    """Whose the cluster's RayCluster definition is, if there is one and it isn't ours."""
    try:
        found = await api.get(CRD_PATH)
    except ApiError as error:
        if error.status == 404:
            return None
        raise
    if (found["metadata"].get("labels") or {}).get(names.CREATED_BY) == names.OPERATOR:
        return None
    annotations = found["metadata"].get("annotations") or {}
    return "KubeRay" if "controller-gen.kubebuilder.io/version" in annotations else "somebody else"


async def _check_resource(api: Api, settings: OperatorSettings) -> None:
    try:
        await api.get(clusters_path(settings.namespaces[0] if settings.namespaces else None), {"limit": "1"})
    except ApiError as error:
        if error.passing:
            raise
        if error.status != 404:
            raise OperatorRefused(
                f"RayClusters can't be listed: {error}. The rights that the operator needs are those in "
                "`everstep operator manifests`"
            ) from error
        raise OperatorRefused(
            f"this cluster doesn't know {names.PLURAL}.{names.GROUP}/{names.VERSION}: install it with "
            "`everstep operator manifests --crd-only | kubectl apply -f -`"
        ) from error


async def _check_kuberay(api: Api, settings: OperatorSettings) -> None:
    try:
        deployments, _ = await api.list("/apis/apps/v1/deployments")
    except ApiError as error:
        if error.status != 403:
            raise
        logger.warning("whether KubeRay's operator runs here can't be seen: %s", error.message)
        return
    for deployment in filter(is_kuberay, deployments):
        if deployment["spec"].get("replicas", 1) == 0:
            continue
        watched = watched_namespaces(deployment)
        shared = watched if not settings.namespaces else settings.namespaces
        if watched and settings.namespaces:
            shared = tuple(sorted(set(watched) & set(settings.namespaces)))
            if not shared:
                continue
        meta = deployment["metadata"]
        whose = f"{meta['namespace']}/{meta['name']}"
        where = ", ".join(shared) if shared else "all namespaces"
        stop = f"kubectl -n {meta['namespace']} scale deployment {meta['name']} --replicas=0"
        raise OperatorRefused(
            f"KubeRay's operator ({whose}) looks after RayClusters in {where}, and "
            "two operators must not share a namespace. Give this one others with --namespace, or restrict "
            f"KubeRay with --watch-namespace, or stop it: {stop}"
        )


def is_kuberay(deployment: Mapping[str, Any]) -> bool:
    """Whether it is KubeRay's operator: from its Helm chart, its kustomization or elsewhere."""
    template = deployment["spec"]["template"]
    for meta in (deployment["metadata"], template.get("metadata") or {}):
        labels = meta.get("labels") or {}
        if _KUBERAY in (labels.get("app.kubernetes.io/name"), labels.get("app.kubernetes.io/component")):
            return True
    images = [container.get("image", "") for container in template["spec"]["containers"]]
    return any(re.search(r"(^|/)kuberay/operator([:@]|$)", image) for image in images)


def watched_namespaces(deployment: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that a KubeRay operator is configured to watch; none means all."""
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        words = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
        for i, word in enumerate(words):
            flag, said, given = word.lstrip("-").partition("=")
            if flag == "watch-namespace":
                if not said and i + 1 < len(words):
                    given = words[i + 1]
                return tuple(name for name in given.strip("\"'").split(",") if name)
    return ()
