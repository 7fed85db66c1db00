"""Keeps the store in step with the API server: lists once, then follows; lists again where the thread is
lost.

A list after a gap shows which objects are gone. That is why this isn't left to a framework whose lists only
say what is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from everstep.kube.api import UNREACHABLE, Api, ApiError, WatchExpired, said
from everstep.kube.store import Key

_LONGEST_PAUSE_S = 30.0
_BETWEEN_S = 0.2

logger = logging.getLogger("everstep.kube")


class Informer:
    """Follows one kind of object in one namespace, or in all (``None``)."""

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        namespace: str | None,
        listed: Callable[[str | None, Iterable[dict[str, Any]], int], set[Key]],
        put: Callable[[dict[str, Any]], Key | None],
        drop: Callable[[dict[str, Any]], Key | None],
        changed: Callable[[Key], None],
    ) -> None:
        self._api, self._path, self._selector, self._namespace = api, path, selector, namespace
        self._listed, self._put, self._drop, self._changed = listed, put, drop, changed
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """For ever. If access is refused before the first list, the error is raised."""
        pause = 0.0
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                async for kind, found in self._api.watch(self._path, version, self._selector):
                    version = found["metadata"]["resourceVersion"]
                    pause = 0.0
                    self._take(kind, found)
                # The server ends a watch every few minutes. One that ends at once mustn't make us spin.
                await asyncio.sleep(_BETWEEN_S)
            except WatchExpired:
                version = ""
                pause = await _rest(pause)
            except ApiError as error:
                if not self.synced.is_set() and not error.passing:
                    raise
                version = ""
                logger.warning("watching %s: %s", self._path, error)
                pause = await _rest(pause)
            except UNREACHABLE as error:
                logger.warning("the API server doesn't answer (%s): %s", self._path, said(error))
                pause = await _rest(pause)

    async def list_now(self) -> None:
        """Beside the watch: later events of the watch are newer."""
        await self._list()

    async def _list(self) -> str:
        items, version = await self._api.list(self._path, self._selector)
        for key in self._listed(self._namespace, items, int(version)):
            self._changed(key)
        self.synced.set()
        return version

    def _take(self, kind: str, found: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        key = self._drop(found) if kind == "DELETED" else self._put(found)
        if key is not None:
            self._changed(key)


async def _rest(pause: float) -> float:
    pause = min(max(0.2, pause * 2), _LONGEST_PAUSE_S)
    await asyncio.sleep(pause)
    return pause
