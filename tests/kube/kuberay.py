"""KubeRay's part in a move: the objects it makes for a cluster, as it makes them, and what it looks for."""

from __future__ import annotations

from typing import Any

from kube.live import Namespace

APP = {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/created-by": "kuberay-operator"}
PORTS = {"client": 10001, "dashboard": 8265, "gcs-server": 6379, "metrics": 8080, "serve": 8000}

Raw = dict[str, Any]


def labels(cluster: str, node_type: str, group: str) -> dict[str, str]:
    return {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": cluster,
        "ray.io/node-type": node_type,
        "ray.io/group": group,
        "ray.io/identifier": f"{cluster}-{node_type}",
        **APP,
    }


def head_selector(cluster: str) -> dict[str, str]:
    head = labels(cluster, "head", "headgroup")
    return {key: value for key, value in head.items() if key not in ("ray.io/is-ray-node", "ray.io/group")}


class KubeRay:
    """Makes a cluster's objects, once; it runs no loop."""

    def __init__(self, space: Namespace, cluster: Raw) -> None:
        self._space, self._name = space, cluster["metadata"]["name"]
        owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": self._name}
        rest = {"uid": cluster["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}
        self._owner = [{**owner, **rest}]

    def head_service(self) -> None:
        ports = [{"name": name, "port": port, "appProtocol": "tcp"} for name, port in PORTS.items()]
        selector = head_selector(self._name)
        self._make(
            "Service",
            f"{self._name}-head-svc",
            selector,
            {"selector": selector, "ports": ports, "clusterIP": "None", "publishNotReadyAddresses": True},
        )

    def headless_service(self) -> None:
        selector = {"ray.io/cluster": self._name, "ray.io/node-type": "worker"}
        spec = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True}
        self._make("Service", f"{self._name}-headless", {"ray.io/headless-worker-svc": self._name}, spec)

    def head(self, name: str) -> None:
        self._pod(name, labels(self._name, "head", "headgroup"))

    def worker(self, name: str, group: str, index: int, replica: str = "", host: int = 0) -> None:
        """With ``RayMultiHostIndexing``: an index always, the rest where a replica has several hosts."""
        own = {"ray.io/worker-group-replica-index": str(index)}
        if replica:
            own["ray.io/worker-group-replica-name"] = replica
            own["ray.io/replica-host-index"] = str(host)
        self._pod(name, {**labels(self._name, "worker", group), **own})

    def takes_on(self) -> list[str]:
        """What it would make, or fail to make, if it ran now: nothing, where all is as it looks for it."""
        services = self._space.get("services")["items"]
        heads = [s for s in services if has(s, {"ray.io/cluster": self._name, "ray.io/node-type": "head"})]
        missing = [] if len(heads) == 1 else [f"{len(heads)} head Services"]
        groups = self._space.cluster(self._name)["spec"]["workerGroupSpecs"]
        if any(group.get("numOfHosts", 1) > 1 for group in groups):
            known = [s for s in services if has(s, {"ray.io/headless-worker-svc": self._name})]
            missing += [] if known else ["no headless Service by its label"]
        pods = self._space.pods(**{"ray.io/cluster": self._name})
        if sum(has(pod, {"ray.io/node-type": "head"}) for pod in pods) != 1:
            missing.append("no head")
        for group in groups:
            workers = [pod for pod in pods if has(pod, {"ray.io/group": group["groupName"]})]
            hosts = group.get("numOfHosts", 1)
            if len(workers) != group["replicas"] * hosts:
                missing.append(f"{len(workers)} workers of {group['groupName']}")
            by_name: dict[str, set[str]] = {}
            for pod in workers if hosts > 1 else ():
                own = pod["metadata"]["labels"]
                replica = by_name.setdefault(own["ray.io/worker-group-replica-name"], set())
                replica.add(own["ray.io/replica-host-index"])
            if any(replica != set(map(str, range(hosts))) for replica in by_name.values()):
                missing.append(f"incomplete replicas of {group['groupName']}: {by_name}")
        return missing

    def _pod(self, name: str, own: dict[str, str]) -> None:
        self._make("Pod", name, own, {"containers": [{"name": "ray", "image": "rayproject/ray:2.60.0"}]})

    def _make(self, kind: str, name: str, own: dict[str, str], spec: Raw) -> None:
        meta = {"name": name, "labels": own, "ownerReferences": self._owner}
        self._space.create({"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": spec})


def has(found: Raw, wanted: dict[str, str]) -> bool:
    own = found["metadata"].get("labels") or {}
    return all(own.get(key) == value for key, value in wanted.items())


def reaches(service: Raw, pod: Raw) -> bool:
    return has(pod, service["spec"]["selector"])
