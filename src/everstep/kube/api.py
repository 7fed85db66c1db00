"""The API server: requests, lists and watches, as plain JSON.

Finding it, and proving who we are, is kubernetes_asyncio's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import yaml
from kubernetes_asyncio import client, config

from everstep import __version__
from everstep.kube import names

_PAGE = 500
_TIMEOUT_S = 30.0
_WATCH_S = 60
"""Seconds after which a watch is begun anew: if its other end is gone, it just stays silent."""
_SILENT_S = 15
"""Seconds after its end at which it is given up."""
_REFRESH_S = 60.0
_PATIENCE_S = 60.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_REMEDY = "name one with --kubeconfig or KUBECONFIG, and see what `kubectl cluster-info` says"
MERGE = "application/merge-patch+json"

Json = dict[str, Any]
Answer = TypeVar("Answer")

logger = logging.getLogger("everstep.kube")


class ApiError(Exception):
    """The API server said no."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{message or reason} (HTTP {status})")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def passing(self) -> bool:
        """Whether the same may well work in a moment."""
        return self.status in (408, 409, 429) or self.status >= 500


class NoCluster(Exception):
    """No cluster is found, or no way in. Says where it was looked for."""


class WatchExpired(Exception):
    """The watch can't go on from where it was: list again."""


class Api:
    """One connection pool to one API server."""

    def __init__(
        self, configuration: client.Configuration, credentials: config.KubeConfigLoader | None = None
    ) -> None:
        self.configuration = configuration
        self.on_answer: Callable[[str, int], None] = lambda method, code: None
        """Hears of each request's method and the answer's status."""
        self._client = client.ApiClient(configuration)
        self._client.user_agent = f"everstep-operator/{__version__}"
        self._refreshing = asyncio.create_task(_keep_fresh(configuration, credentials))

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> Api:
        """As kubectl finds it: ``kubeconfig``, ``KUBECONFIG``, ``~/.kube/config``; in a Pod, its account."""
        configuration = client.Configuration()
        given = kubeconfig or os.environ.get("KUBECONFIG")
        try:
            if not given and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=configuration)
                return cls(configuration)
            credentials = await config.load_kube_config(
                config_file=_kubeconfig(given), context=context, client_configuration=configuration
            )
        except (config.ConfigException, yaml.YAMLError, OSError) as error:
            raise NoCluster(
                f"no cluster is found in {given or 'the kubeconfig'}: {error}; {_REMEDY}"
            ) from error
        return cls(configuration, credentials)

    async def close(self) -> None:
        self._refreshing.cancel()
        await self._client.close()

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        return await self._json("GET", path, query=query)

    async def create(self, path: str, manifest: Mapping[str, Any]) -> Json:
        return await self._json("POST", path, body=manifest)

    async def replace(self, path: str, manifest: Mapping[str, Any]) -> Json:
        return await self._json("PUT", path, body=manifest)

    async def patch(self, path: str, change: Any, kind: str = MERGE) -> Json:
        return await self._json("PATCH", path, body=change, content_type=kind)

    async def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Json:
        return await self._json("DELETE", path, body=options)

    async def list(self, path: str, selector: str = "") -> tuple[list[Json], str]:
        """All items, and the version from which to watch on."""
        items: list[Json] = []
        query = {"limit": str(_PAGE), **({"labelSelector": selector} if selector else {})}
        while True:
            try:
                page = await self.get(path, query)
            except ApiError as error:
                if error.status != 410 or "continue" not in query:
                    raise
                # The server has forgotten what the first pages were of: all at once, then.
                items, query = [], {"labelSelector": selector} if selector else {}
                continue
            items += page["items"]
            going_on = page["metadata"].get("continue")
            if not going_on:
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = going_on

    async def watch(self, path: str, version: str, selector: str = "") -> AsyncIterator[tuple[str, Json]]:
        """What changes from there on, until the server ends it. Bookmarks are passed on."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_S),
            **({"labelSelector": selector} if selector else {}),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_WATCH_S + _SILENT_S)
        response = await self._request("GET", path, query, None, "application/json", timeout)
        try:
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = msgspec.json.decode(line)
                    kind, found = event["type"], event["object"]
                    if kind == "ERROR":
                        if found.get("code") == 410:
                            raise WatchExpired(found.get("message", ""))
                        raise ApiError(
                            found.get("code", 500), found.get("reason", ""), found.get("message", "")
                        )
                    yield kind, found
        finally:
            response.close()

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Json:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        response = await self._request(method, path, query, body, content_type, timeout)
        async with response:
            decoded: Json = msgspec.json.decode(await response.read())
            return decoded

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Any,
        content_type: str,
        patience: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self._client.call_api(
            path,
            method,
            query_params=list((query or {}).items()),
            header_params={"Content-Type": content_type, "Accept": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=patience,
        )
        self.on_answer(method, response.status)
        if response.status >= 400:
            async with response:
                raise _error(response.status, await response.read())
        return response


def _kubeconfig(given: str | None) -> str:
    paths = given or str(Path.home() / ".kube" / "config")
    if not any(Path(path).is_file() for path in paths.split(os.pathsep)):
        raise NoCluster(f"there is no kubeconfig at {paths}: {_REMEDY}")
    return paths


async def _keep_fresh(
    configuration: client.Configuration, credentials: config.KubeConfigLoader | None
) -> None:
    """Tokens that a program hands out (as for GKE and EKS) run out; this asks for the next one in time.

    Those of a Pod's account are read again by themselves.
    """
    while credentials is not None and credentials._user is not None:
        try:
            await config.refresh_token(credentials, configuration, _REFRESH_S)
            return  # there is nothing to refresh
        except (config.ConfigException, OSError, ValueError) as error:
            logger.warning("no fresh token could be had: %s", error)


UNREACHABLE = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""What it looks like when there is no answer."""


async def patiently(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """For what is asked once, at the start: a server that is only busy, or just starting itself, is asked
    again for a while. If there is none at all, the error is raised at once.
    """
    pause, deadline = _FIRST_PAUSE_S, time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await ask()
        except ApiError as error:
            if not error.passing or time.monotonic() + pause > deadline:
                raise
            logger.warning("the API server can't answer yet: %s", error)
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_S)


def said(error: BaseException) -> str:
    """A time-out, for one, says nothing by itself."""
    return str(error) or type(error).__name__


def _error(status: int, body: bytes) -> ApiError:
    try:
        said = msgspec.json.decode(body)
        return ApiError(status, said.get("reason", ""), said.get("message", ""))
    except (msgspec.DecodeError, AttributeError):
        return ApiError(status, "", body.decode(errors="replace")[:500])


def clusters_path(namespace: str | None, name: str = "", sub: str = "") -> str:
    return _path(f"/apis/{names.GROUP}/{names.VERSION}", names.PLURAL, namespace, name, sub)


def core_path(plural: str, namespace: str | None, name: str = "") -> str:
    return _path("/api/v1", plural, namespace, name, "")


def pod_groups_path(api: str, namespace: str | None) -> str:
    return _path(f"/apis/{api}", "podgroups", namespace, "", "")


def path_for(manifest: Mapping[str, Any]) -> str:
    """Where to post a manifest of the few kinds that the operator makes."""
    version: str = manifest["apiVersion"]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return _path(base, f"{manifest['kind'].lower()}s", manifest["metadata"]["namespace"], "", "")


def _path(base: str, plural: str, namespace: str | None, name: str, sub: str) -> str:
    where = f"/namespaces/{namespace}" if namespace else ""
    return "/".join(part for part in (f"{base}{where}/{plural}", name, sub) if part)
