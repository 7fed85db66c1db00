"""A cluster made of values: manifests to reconcile, and Pods that come, fail, hang and go. Virtual time."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from everstep.kube import actions, services
from everstep.kube.actions import Plan
from everstep.kube.backoff import ApiRefusal, ReplicaFailure
from everstep.kube.reconcile import Observed, reconcile
from everstep.kube.spec import ClusterSpec, parse
from everstep.kube.view import PodView, ServiceView, service_view, view

UID = "cluster-uid"
GRACE_S = 30.0


def template(**spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray", "image": "rayproject/ray:2.60.0"}], **spec}}


def group(name: str = "tpu", replicas: int = 3, hosts: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": 0,
        "maxReplicas": 100,
        "numOfHosts": hosts,
        "template": template(),
        **more,
    }


def manifest(*groups: dict[str, Any], name: str = "demo", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": UID,
            "generation": 1,
            "annotations": {"everstep.dev/managed": "true"},
        },
        "spec": {"headGroupSpec": {"template": template()}, "workerGroupSpecs": list(groups), **spec},
    }


class World:
    """What an API server and kubelets would make of the plans."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = copy.deepcopy(raw)
        self.now = 1000.0
        self.pods: dict[str, PodView] = {}
        self.services: dict[str, ServiceView] = {}
        self.refusals: dict[str, ApiRefusal] = {}
        self.failures: dict[tuple[str, int], ReplicaFailure] = {}
        self.vacated: set[tuple[str, int]] = set()
        self.served: frozenset[str] = frozenset()
        self.told: list[actions.Announce] = []
        self._uids = 0

    @property
    def cluster(self) -> ClusterSpec:
        return parse(self.raw)

    @property
    def workers(self) -> list[PodView]:
        return sorted(
            (p for p in self.pods.values() if p.node_type == "worker"),
            key=lambda p: (p.group, p.index or 0, p.host or 0),
        )

    def plan(self) -> Plan:
        seen = Observed(
            pods=list(self.pods.values()),
            services=dict(self.services),
            refusals=dict(self.refusals),
            failures=dict(self.failures),
            vacated=set(self.vacated),
            served=self.served,
        )
        return reconcile(self.cluster, seen, self.now)

    def step(self) -> Plan:
        plan = self.plan()
        self.carry_out(plan)
        return plan

    def settle(self, most: int = 50) -> None:
        """Until there is nothing to do, with kubelets that do their part."""
        for _ in range(most):
            leaving = any(pod.leaving is not None for pod in self.pods.values())
            if not self.step().actions and not leaving:
                return
            self.kubelets()
        raise AssertionError(f"still at it after {most} steps: {self.plan().actions}")

    def carry_out(self, plan: Plan) -> None:
        for action in plan.actions:
            match action:
                case actions.CreateService(manifest=made):
                    self.services[made["metadata"]["name"]] = service_view(made)
                case actions.ChangeService(name=name):
                    wanted = {s["metadata"]["name"]: s for s in services.wanted(self.cluster)}
                    self.services[name] = service_view(wanted[name])
                case actions.CreateHead(manifest=made):
                    self.add(made)
                case actions.CreateReplica():
                    for pod in action.manifests(self.cluster):
                        self.add(pod)
                case actions.DeletePod(name=name, uid=uid):
                    if name in self.pods and self.pods[name].uid == uid:
                        self.delete(name)
                case actions.LabelPod(name=name, labels=labels, hosts=hosts):
                    self.change(
                        name,
                        index=int(labels["ray.io/worker-group-replica-index"]),
                        replica=labels["ray.io/worker-group-replica-name"],
                        host=int(labels["ray.io/replica-host-index"]),
                        hosts=hosts,
                    )
                case actions.Announce():
                    self.told.append(action)
                case actions.Remember(failure=failure):
                    self.failures[failure.group, failure.index] = failure

    def add(self, made: dict[str, Any]) -> PodView:
        assert made["metadata"]["name"] not in self.pods, "a name is used twice"
        self._uids += 1
        meta = {**made["metadata"], "uid": f"uid-{self._uids}", "resourceVersion": str(self._uids)}
        pod = msgspec.structs.replace(view({**made, "metadata": meta}), created=self.now)
        self.pods[pod.name] = pod
        return pod

    def change(self, name: str, **fields: Any) -> None:
        self.pods[name] = msgspec.structs.replace(self.pods[name], **fields)

    def delete(self, name: str) -> None:
        """As the API server does: at once what runs nowhere, else after its grace."""
        pod = self.pods[name]
        if not pod.scheduled:
            del self.pods[name]
        elif pod.leaving is None:
            self.change(name, leaving=self.now + GRACE_S)

    def kubelets(self, hanging: frozenset[str] = frozenset()) -> None:
        """All Pods get a node and get ready; all that leave are gone, but for those that hang."""
        self.now += 1.0
        for name, pod in list(self.pods.items()):
            if pod.leaving is not None:
                if name not in hanging:
                    del self.pods[name]
            elif not pod.broken and not pod.node_lost:
                self.change(name, scheduled=True, ready=True)

    def replica(self, index: int, of: str = "tpu") -> list[PodView]:
        return [p for p in self.workers if p.group == of and p.index == index]

    def indices(self, of: str = "tpu") -> list[int]:
        return sorted({p.index for p in self.workers if p.group == of and p.index is not None})
