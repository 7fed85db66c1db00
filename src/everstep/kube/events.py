"""Events, for people. The same reason about the same thing is one event that is counted up, as kubectl shows
it, and not one for each retry.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from everstep.kube import names
from everstep.kube.actions import Announce
from everstep.kube.api import UNREACHABLE, Api, ApiError, core_path, said
from everstep.kube.conditions import stamp

_MOST_KNOWN = 4096

logger = logging.getLogger("everstep.kube")


class Events:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._counts: dict[str, int] = {}
        """By the event's name: how often it was written."""

    async def publish(self, about: Mapping[str, Any], note: Announce) -> None:
        """What can't be written is only logged: an event is never worth holding anything up."""
        meta = about["metadata"]
        name = _name(meta, note)
        try:
            if name not in self._counts or not await self._counted_up(meta["namespace"], name, note):
                await self._write(about, name, note)
        except (ApiError, *UNREACHABLE) as error:
            logger.warning(
                "%s/%s: no event could be written: %s", meta["namespace"], meta["name"], said(error)
            )

    async def publish_once(self, about: Mapping[str, Any], note: Announce) -> None:
        """Also over the lives of operators."""
        name = _name(about["metadata"], note)
        if name in self._counts:
            return
        try:
            await self._api.create(
                core_path("events", about["metadata"]["namespace"]), _event(about, name, note)
            )
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        self._know(name, 1)

    async def _write(self, about: Mapping[str, Any], name: str, note: Announce) -> None:
        namespace = about["metadata"]["namespace"]
        try:
            await self._api.create(core_path("events", namespace), _event(about, name, note))
            self._know(name, 1)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            known = await self._api.get(core_path("events", namespace, name))
            await self._count_up(namespace, name, note, int(known.get("count") or 1) + 1)

    async def _counted_up(self, namespace: str, name: str, note: Announce) -> bool:
        """Unless the server has forgotten it: it keeps events for an hour."""
        try:
            await self._count_up(namespace, name, note, self._counts[name] + 1)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def _count_up(self, namespace: str, name: str, note: Announce, count: int) -> None:
        change = {"count": count, "lastTimestamp": stamp(time.time()), "message": note.message[:1000]}
        await self._api.patch(core_path("events", namespace, name), change)
        self._know(name, count)

    def _know(self, name: str, count: int) -> None:
        self._counts.pop(name, None)
        self._counts[name] = count
        if len(self._counts) > _MOST_KNOWN:
            del self._counts[next(iter(self._counts))]


def _name(meta: Mapping[str, Any], note: Announce) -> str:
    same = f"{meta['uid']}\0{note.reason}\0{note.about}"
    return f"{meta['name'][:50]}.{hashlib.sha256(same.encode()).hexdigest()[:16]}"


def _event(about: Mapping[str, Any], name: str, note: Announce) -> dict[str, Any]:
    meta, now = about["metadata"], stamp(time.time())
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": about.get("apiVersion", f"{names.GROUP}/{names.VERSION}"),
            "kind": about.get("kind", names.KIND),
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": "Warning" if note.warning else "Normal",
        "reason": note.reason,
        "message": note.message[:1000],
        "source": {"component": names.OPERATOR},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
