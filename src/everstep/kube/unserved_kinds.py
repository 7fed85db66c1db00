"""RayJobs and RayServices: where KubeRay's definitions are left without its operator, nothing runs them.

They get an event that says so, once each, so that their users know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from everstep.kube import names
from everstep.kube.actions import Announce
from everstep.kube.api import UNREACHABLE, Api, ApiError, said
from everstep.kube.events import Events
from everstep.kube.informer import Informer
from everstep.kube.store import Key

_KINDS = {"rayjobs": "RayJob", "rayservices": "RayService"}
_API = f"/apis/{names.GROUP}/{names.VERSION}"
_LOOK_AGAIN_S = 300.0

logger = logging.getLogger("everstep.kube")


class UnservedKinds:
    def __init__(self, api: Api, namespace: str | None, events: Events) -> None:
        self._api, self._namespace, self._events = api, namespace, events

    async def run(self) -> None:
        """For ever. A definition that is installed later is found later."""
        found: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for plural in await self._defined() - found:
                    found.add(plural)
                    tasks.create_task(self._follow(plural, tasks))
                await asyncio.sleep(_LOOK_AGAIN_S)

    async def _defined(self) -> set[str]:
        try:
            resources = (await self._api.get(_API))["resources"]
        except (ApiError, *UNREACHABLE) as error:
            logger.warning("which kinds of %s there are can't be seen: %s", names.GROUP, said(error))
            return set()
        return {resource["name"] for resource in resources} & set(_KINDS)

    async def _follow(self, plural: str, tasks: asyncio.TaskGroup) -> None:
        where = f"/namespaces/{self._namespace}" if self._namespace else ""

        def put(found: dict[str, Any]) -> Key | None:
            tasks.create_task(self._answer(plural, found))
            return None

        def listed(_: str | None, items: Iterable[dict[str, Any]], __: int) -> set[Key]:
            for item in items:
                put(item)
            return set()

        informer = Informer(
            self._api,
            f"{_API}{where}/{plural}",
            "",
            self._namespace,
            listed,
            put,
            lambda _: None,
            lambda _: None,
        )
        try:
            await informer.run()
        except ApiError as error:
            logger.warning("%s can't be seen, so they get no answer: %s", plural, error.message)

    async def _answer(self, plural: str, found: dict[str, Any]) -> None:
        if (found.get("spec") or {}).get("managedBy") not in (None, names.MANAGED_BY_US):
            return
        kind = _KINDS[plural]
        message = (
            f"nobody runs this {kind}: KubeRay's operator doesn't look after this namespace, and Everstep's "
            "runs RayClusters only. Make a RayCluster, and submit to it with `ray job submit`"
        )
        about = {"apiVersion": f"{names.GROUP}/{names.VERSION}", "kind": kind, **found}
        try:
            await self._events.publish_once(about, Announce(True, "NotSupported", message))
        except (ApiError, *UNREACHABLE) as error:
            logger.warning("no event could be written for %s: %s", found["metadata"]["name"], said(error))
