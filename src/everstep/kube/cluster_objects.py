"""What is written of one cluster: its Services, Pods and PodGroups, each kept in the store as answered."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any

from everstep.kube import actions, names
from everstep.kube.actions import Announce
from everstep.kube.api import ApiError, core_path, path_for, pod_groups_path
from everstep.kube.headstate import TOKEN_KEY
from everstep.kube.spec import Manifest
from everstep.kube.store import Key
from everstep.kube.view import owner_of

if TYPE_CHECKING:
    from everstep.kube.operator import Operator

_SPELLED = {
    "Service": "service",
    "ServiceAccount": "service account",
    "Role": "role",
    "RoleBinding": "role binding",
    "Secret": "secret",
}
"""As KubeRay's events spell what was created."""

logger = logging.getLogger("everstep.kube")


class ClusterObjects:
    """Writes only as long as this operator may (``Operator.may_write``)."""

    def __init__(self, operator: Operator, key: Key) -> None:
        self._operator, self._key = operator, key
        self._namespace, self._name = key
        self.uid = ""
        """Of the cluster: one of the same name that comes later is another."""
        self.made: list[Announce] = []
        """What was created, for people to read of."""

    def _created(self, reason: str, what: str, name: str) -> None:
        self.made.append(Announce(False, reason, f"Created {what} {self._namespace}/{name}", name))

    async def create_service(self, manifest: Manifest) -> None:
        self._operator.store.put_service(await self._create_once(manifest))

    async def change_service(self, name: str, change: Manifest) -> None:
        self._operator.may_write(self._namespace)
        path = core_path("services", self._namespace, name)
        self._operator.store.put_service(await self._operator.api.patch(path, change))

    async def _create_once(self, manifest: Manifest) -> dict[str, Any]:
        self._operator.may_write(self._namespace)
        path, name = path_for(manifest), manifest["metadata"]["name"]
        if manifest["kind"] == "Secret":
            manifest = {**manifest, "stringData": {TOKEN_KEY: secrets.token_urlsafe(32)}}
        try:
            made = await self._operator.api.create(path, manifest)
            self._created(f"Created{manifest['kind']}", _SPELLED[manifest["kind"]], name)
            return made
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        if manifest["kind"] == "Secret":
            return manifest  # the user's own, or ours from before; Secrets are never read here
        there = await self._operator.api.get(f"{path}/{name}")
        if owner_of(there) not in (None, self.uid):
            message = (
                f"the {manifest['kind']} {name} of an earlier cluster of this name is still to be deleted"
            )
            raise ApiError(409, "AlreadyExists", message)
        there["metadata"].setdefault("labels", {})[names.CLUSTER] = self._name
        return there

    async def create_pod_group(self, manifest: Manifest) -> None:
        self._operator.may_write(self._namespace)
        try:
            made = await self._operator.api.create(path_for(manifest), manifest)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            return  # names are used once: it is ours, and the answer was lost
        self._operator.store.put_pod_group(made)

    async def delete_pod_group(self, name: str, uid: str, api: str) -> None:
        self._operator.may_write(self._namespace)
        path = f"{pod_groups_path(api, self._namespace)}/{name}"
        try:
            await self._operator.api.delete(path, {"preconditions": {"uid": uid}})
        except ApiError as error:
            if not _is_gone(error):
                raise
        self._operator.store.forget_pod_group(self._key, name, uid)

    async def create_head(self, action: actions.CreateHead) -> None:
        for manifest in action.beside:
            await self._create_once(manifest)
        await self.create_pod(action.manifest)
        self._created("CreatedHeadPod", "head Pod", action.manifest["metadata"]["name"])

    async def create_pod(self, manifest: Manifest) -> dict[str, Any]:
        self._operator.may_write(self._namespace)
        made = await self._operator.api.create(path_for(manifest), manifest)
        self._operator.store.put_pod(made)
        return made

    async def delete_pod(self, name: str, uid: str) -> None:
        self._operator.may_write(self._namespace)
        try:
            path = core_path("pods", self._namespace, name)
            left = await self._operator.api.delete(path, {"preconditions": {"uid": uid}})
        except ApiError as error:
            if _is_gone(error):
                self._operator.store.forget_pod(self._key, uid)
                return
            raise
        if left.get("kind") == "Pod" and left["metadata"].get("deletionTimestamp"):
            self._operator.store.put_pod(left)

    async def label_pod(self, action: actions.LabelPod) -> None:
        self._operator.may_write(self._namespace)
        change = {
            "metadata": {
                "uid": action.uid,
                "labels": dict(action.labels),
                "annotations": {names.HOSTS: str(action.hosts)},
            }
        }
        logger.info("%s/%s: taking in %s as %s", *self._key, action.name, action.labels)
        try:
            made = await self._operator.api.patch(core_path("pods", self._namespace, action.name), change)
            self._operator.store.put_pod(made)
        except ApiError as error:
            if not _is_gone(error):
                raise
            self._operator.store.forget_pod(self._key, action.uid)


def _is_gone(error: ApiError) -> bool:
    """Whether there is no Pod of that name, or another one by now."""
    return error.status == 404 or (error.status == 409 and "UID in precondition" in error.message)
