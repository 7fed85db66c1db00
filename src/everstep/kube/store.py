"""What the API server holds, as far as the operator knows: from watches, and from the answers to its own
writes.

A watch lags behind, and an answer may come before or after it. Versions decide which of two sightings is the
later, so that what was just written counts as seen, and what was just deleted doesn't come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import msgspec

from everstep.kube import names
from everstep.kube.backoff import STEADY_S
from everstep.kube.gangs import PodGroups, PodGroupView
from everstep.kube.nodes import NodeView, node_view, notable
from everstep.kube.view import PodView, ServiceView, owner_of, service_view, view

Key = tuple[str, str]
"""A cluster's namespace and name."""

Json = Mapping[str, Any]

_MOST_BURIED = 20_000
"""Answers about those that went before them have long come."""


class ObjectCache:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._vacated: dict[Key, dict[tuple[str, int], float]] = {}
        self.clusters: dict[Key, Json] = {}
        self._pods: dict[Key, dict[str, PodView]] = {}
        self._services: dict[Key, dict[str, ServiceView]] = {}
        self._nodes: dict[str, NodeView] = {}
        self.served: frozenset[str] = frozenset()
        """The versions of APIs in which the server has PodGroups."""
        self.sees_pod_groups = True
        self._pod_groups: dict[Key, dict[str, PodGroupView]] = {}
        self._buried: dict[str, None] = {}
        """The uids of the last Pods and clusters that went: an answer that comes late mustn't raise them."""

    def pods(self, key: Key) -> list[PodView]:
        return list(self._pods.get(key, {}).values())

    def vacated(self, key: Key) -> set[tuple[str, int]]:
        """Places, by group and index, that Pods which had a node have left lately."""
        places = self._vacated.get(key, {})
        for place, at in list(places.items()):
            if self._clock() > at + STEADY_S:
                del places[place]
        return set(places)

    @property
    def nodes(self) -> dict[str, NodeView]:
        """Those that there is something to say about."""
        return notable(self._nodes.values())

    def put_node(self, raw: Json) -> None:
        seen = node_view(raw)
        there = self._nodes.get(seen.name)
        if there is None or seen.version >= there.version:
            self._nodes[seen.name] = seen

    def drop_node(self, raw: Json) -> None:
        """A node that is deleted takes its Pods along soon enough."""
        seen = node_view(raw)
        self._nodes[seen.name] = msgspec.structs.replace(seen, gone=True)

    def nodes_listed(self, items: Iterable[Json], version: int) -> set[str]:
        """Returns the names of all that may have changed."""
        listed = list(items)
        for item in listed:
            self.put_node(item)
        there = {item["metadata"]["name"] for item in listed}
        for name, seen in list(self._nodes.items()):
            if name not in there and seen.version <= version:
                self._nodes[name] = msgspec.structs.replace(seen, gone=True)
        return set(self._nodes)

    def clusters_on(self, nodes: Container[str]) -> set[Key]:
        return {key for key, pods in self._pods.items() if any(pod.node in nodes for pod in pods.values())}

    def services(self, key: Key) -> dict[str, ServiceView]:
        return dict(self._services.get(key, {}))

    def put_cluster(self, raw: Json) -> Key:
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        known = self.clusters.get(key)
        if raw["metadata"]["uid"] not in self._buried and (known is None or _version(raw) >= _version(known)):
            self.clusters[key] = raw
        return key

    def drop_cluster(self, raw: Json) -> Key:
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        self._bury(raw["metadata"]["uid"])
        if key in self.clusters and self.clusters[key]["metadata"]["uid"] == raw["metadata"]["uid"]:
            del self.clusters[key]
        return key

    def put_pod(self, raw: Json) -> Key | None:
        key = _key(raw)
        if key is None:
            return None
        pods = self._pods.setdefault(key, {})
        seen = view(raw)
        known = pods.get(seen.uid)
        if seen.uid not in self._buried and (known is None or seen.version >= known.version):
            pods[seen.uid] = seen
        return key

    def drop_pod(self, raw: Json) -> Key | None:
        key = _key(raw)
        if key is not None:
            self.forget_pod(key, raw["metadata"]["uid"])
        return key

    def forget_pod(self, key: Key, uid: str) -> None:
        """The API server says that there is no such Pod."""
        gone = self._pods.get(key, {}).pop(uid, None)
        if gone is not None and gone.index is not None and gone.scheduled:
            self._vacated.setdefault(key, {})[gone.group, gone.index] = self._clock()
        self._bury(uid)

    def put_service(self, raw: Json) -> Key | None:
        key = _key(raw)
        if key is not None:
            known = self._services.setdefault(key, {})
            seen = service_view(raw)
            if seen.name not in known or seen.version >= known[seen.name].version:
                known[seen.name] = seen
        return key

    def drop_service(self, raw: Json) -> Key | None:
        key = _key(raw)
        known = self._services.get(key, {}) if key is not None else {}
        there = known.get(raw["metadata"]["name"])
        if there is not None and there.version <= _version(raw):
            del known[there.name]
        return key

    def pod_groups(self, key: Key) -> PodGroups | None:
        return dict(self._pod_groups.get(key, {})) if self.sees_pod_groups else None

    def put_pod_group(self, raw: Json) -> Key | None:
        key, seen = _key(raw), _pod_group(raw)
        if key is not None and seen.uid not in self._buried:
            known = self._pod_groups.setdefault(key, {})
            if seen.name not in known or seen.version >= known[seen.name].version:
                known[seen.name] = seen
        return key

    def drop_pod_group(self, raw: Json) -> Key | None:
        key = _key(raw)
        if key is not None:
            self.forget_pod_group(key, raw["metadata"]["name"], raw["metadata"]["uid"])
        return key

    def forget_pod_group(self, key: Key, name: str, uid: str) -> None:
        self._bury(uid)
        known = self._pod_groups.get(key, {})
        if name in known and known[name].uid == uid:
            del known[name]

    def pod_groups_listed(
        self, api: str, namespace: str | None, items: Iterable[Json], version: int
    ) -> set[Key]:
        listed = [{"apiVersion": api, **item} for item in items]
        there = {item["metadata"]["uid"] for item in listed}
        changed = {key for key in map(self.put_pod_group, listed) if key is not None}
        for key, known in self._pod_groups.items():
            for seen in list(known.values()):
                mine = seen.api == api and namespace in (None, key[0])
                if mine and seen.uid not in there and seen.version <= version:
                    self.forget_pod_group(key, seen.name, seen.uid)
                    changed.add(key)
        return changed

    def clusters_listed(self, namespace: str | None, items: Iterable[Json], version: int) -> set[Key]:
        there = {self.put_cluster(item) for item in items}
        for key, raw in list(self.clusters.items()):
            if namespace in (None, key[0]) and key not in there and _version(raw) <= version:
                there.add(self.drop_cluster(raw))
        return there

    def pods_listed(self, namespace: str | None, items: Iterable[Json], version: int) -> set[Key]:
        """Take in a list: objects that aren't in it are gone, unless they are newer than the list."""
        listed = list(items)
        there = {item["metadata"]["uid"] for item in listed}
        changed = {key for key in map(self.put_pod, listed) if key is not None}
        for key, pods in self._pods.items():
            for uid, pod in list(pods.items()):
                if namespace in (None, key[0]) and uid not in there and pod.version <= version:
                    self.forget_pod(key, uid)
                    changed.add(key)
        return changed

    def services_listed(self, namespace: str | None, items: Iterable[Json], version: int) -> set[Key]:
        listed = list(items)
        changed = {key for key in map(self.put_service, listed) if key is not None}
        there = {(_key(item), item["metadata"]["name"]) for item in listed}
        for key, known in self._services.items():
            for name, seen in list(known.items()):
                if namespace in (None, key[0]) and (key, name) not in there and seen.version <= version:
                    del known[name]
                    changed.add(key)
        return changed

    def _bury(self, uid: str) -> None:
        self._buried[uid] = None
        if len(self._buried) > _MOST_BURIED:
            del self._buried[next(iter(self._buried))]


def _key(raw: Json) -> Key | None:
    name = (raw["metadata"].get("labels") or {}).get(names.CLUSTER)
    return (raw["metadata"]["namespace"], name) if name else None


def _pod_group(raw: Json) -> PodGroupView:
    meta = raw["metadata"]
    return PodGroupView(
        name=meta["name"],
        uid=meta["uid"],
        version=_version(raw),
        owner=owner_of(raw),
        replica=(meta.get("labels") or {}).get(names.REPLICA_NAME, ""),
        api=raw["apiVersion"],
    )


def _version(raw: Json) -> int:
    return int(raw["metadata"].get("resourceVersion") or 0)
