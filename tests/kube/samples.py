"""What KubeRay's public samples use of a RayCluster, feature by feature, as manifests of our own.

Each with what has to come of it on an API server: Pods that are as they should be, fields that are named as
ignored, or a refusal that names the field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kube.world import group, manifest, template

Raw = dict[str, Any]
GPU, TPU = "nvidia.com/gpu", "google.com/tpu"


class Made(msgspec.Struct):
    """What there is of a cluster, as the API server holds it."""

    heads: list[Raw]
    workers: list[Raw]
    services: dict[str, Raw]

    @property
    def head(self) -> Raw:
        [head] = self.heads
        return head

    def ray(self, pod: Raw | None = None) -> Raw:
        found: Raw = (pod or self.workers[0])["spec"]["containers"][0]
        return found

    def command(self, pod: Raw | None = None) -> str:
        return " ".join(self.ray(pod).get("args") or ())

    def env(self, pod: Raw | None = None) -> dict[str, Raw]:
        return {variable["name"]: variable for variable in self.ray(pod)["env"]}


class Sample(msgspec.Struct, kw_only=True):
    spec: Raw
    metadata: Raw = {}
    check: Callable[[Made], bool] = lambda made: True
    workers: int = 1
    refused: str = ""
    ignored: str = ""
    secret: str = ""

    def manifest(self, name: str) -> Raw:
        raw = manifest(name=name)
        annotations = {"everstep.dev/managed": "true", **self.metadata.get("annotations", {})}
        raw["metadata"] = {
            "name": name,
            "annotations": annotations,
            "labels": self.metadata.get("labels", {}),
        }
        raw["spec"].update(self.spec)
        return raw


def pod(
    resources: Raw | None = None, meta: Raw | None = None, container: Raw | None = None, **spec: Any
) -> Raw:
    made = template(**spec)
    made["spec"]["containers"][0].update(container or {})
    if resources:
        made["spec"]["containers"][0]["resources"] = {"limits": resources, "requests": resources}
    if meta:
        made["metadata"] = meta
    return made


def worker(name: str = "workergroup", replicas: int = 1, hosts: int = 1, **more: Any) -> Raw:
    return group(name, replicas, hosts, **more)


def head(made: Raw | None = None, **more: Any) -> Raw:
    return {"template": made or template(), **more}


SMALL = {"cpu": "1", "memory": "2Gi"}
COUNTED = {"rayStartParams": {"num-cpus": "1"}}
TPUS = {
    "nodeSelector": {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
}


def label(found: Raw, key: str) -> str:
    return str(found["metadata"]["labels"].get(key))


def shared(made: Made) -> Raw:
    [volume] = [v for v in made.workers[0]["spec"]["volumes"] if v["name"] == "shared-mem"]
    found: Raw = volume["emptyDir"]
    return found


SAMPLES: dict[str, Sample] = {
    "the smallest": Sample(
        spec={"workerGroupSpecs": []}, workers=0, check=lambda m: "--head" in m.command(m.head)
    ),
    "memory for the object store": Sample(
        spec={"workerGroupSpecs": [worker(template=pod(SMALL))]},
        check=lambda m: shared(m) == {"medium": "Memory", "sizeLimit": "2Gi"}
        and "--num-cpus=1" in m.command(),
    ),
    "two groups of different machines": Sample(
        spec={
            "workerGroupSpecs": [
                worker("smallGroup", 2, template=pod(SMALL)),
                worker("gpu-group", template=pod({**SMALL, GPU: "1"})),
            ]
        },
        workers=3,
        check=lambda m: {"smallGroup", "gpu-group"} == {label(w, "ray.io/group") for w in m.workers}
        and sum("--num-gpus=1" in m.command(w) for w in m.workers) == 1,
    ),
    "part of a GPU": Sample(
        spec={"workerGroupSpecs": [worker(template=pod({**SMALL, "nvidia.com/mig-1g.5gb": "2"}))]},
        check=lambda m: "--num-gpus=2" in m.command(),
    ),
    "Neuron cores": Sample(
        spec={"workerGroupSpecs": [worker(template=pod({**SMALL, "aws.amazon.com/neuroncore": "2"}))]},
        check=lambda m: '{"neuron_cores":2}' in m.command(),
    ),
    "resources by the group": Sample(
        spec={"workerGroupSpecs": [worker(resources={"cpu": "2", "Special": "0.5"})]},
        check=lambda m: "--num-cpus=2" in m.command() and '{"Special":0.5}' in m.command(),
    ),
    "switches of ray start": Sample(
        spec={
            "headGroupSpec": head(
                rayStartParams={
                    "include-dashboard": "true",
                    "no-monitor": "True",
                    "enable-resource-isolation": "true",
                    "disable-usage-stats": "false",
                }
            ),
            "workerGroupSpecs": [],
        },
        workers=0,
        check=lambda m: {"--include-dashboard=true", "--no-monitor", "--enable-resource-isolation"}
        < set(m.command(m.head).split())
        and "disable-usage-stats" not in m.command(m.head),
    ),
    "a port for Prometheus on every Pod": Sample(
        spec={"workerGroupSpecs": [worker()]},
        check=lambda m: all(
            {"name": "metrics", "containerPort": 8080, "protocol": "TCP"} in m.ray(p)["ports"]
            for p in (m.head, *m.workers)
        ),
    ),
    "a head Service of the user's": Sample(
        spec={
            "headServiceAnnotations": {"team": "mine"},
            "headGroupSpec": head(
                serviceType="NodePort",
                headService={
                    "metadata": {"labels": {"own": "label"}},
                    "spec": {"ports": [{"name": "extra", "port": 9999}]},
                },
            ),
            "workerGroupSpecs": [],
        },
        workers=0,
        check=lambda m: {"extra", "gcs-server", "dashboard", "client"}
        < {p["name"] for p in m.services["head-svc"]["spec"]["ports"]}
        and m.services["head-svc"]["metadata"]["labels"]["own"] == "label",
    ),
    "a command before ray start": Sample(
        spec={"headGroupSpec": head(pod(container={"command": ["echo before"]})), "workerGroupSpecs": []},
        workers=0,
        check=lambda m: "echo before" in m.command(m.head) and "ray start" in m.command(m.head),
    ),
    "a command instead of ray start": Sample(
        metadata={"annotations": {"ray.io/overwrite-container-cmd": "True"}},
        spec={"workerGroupSpecs": [worker(template=pod(container={"command": ["mine"]}))]},
        check=lambda m: m.ray()["command"] == ["mine"]
        and m.env()["KUBERAY_GEN_RAY_START_CMD"]["value"].startswith("ray start"),
    ),
    "a command instead, by the template": Sample(
        spec={
            "workerGroupSpecs": [
                worker(
                    template=pod(
                        meta={"annotations": {"ray.io/overwrite-container-cmd": "true"}},
                        container={"command": ["mine"]},
                    )
                )
            ]
        },
        check=lambda m: m.ray()["command"] == ["mine"],
    ),
    "init containers and a sidecar": Sample(
        spec={
            "workerGroupSpecs": [
                worker(
                    template=pod(
                        initContainers=[{"name": "first", "image": "busybox"}],
                        containers=[
                            {"name": "ray", "image": "rayproject/ray:2.60.0"},
                            {"name": "fluentbit", "image": "fluent/fluent-bit"},
                        ],
                    )
                )
            ]
        },
        check=lambda m: [c["name"] for c in m.workers[0]["spec"]["containers"]] == ["ray", "fluentbit"]
        and all(
            "FQ_RAY_IP" in {v["name"] for v in c["env"]} for c in m.workers[0]["spec"]["initContainers"]
        ),
    ),
    "what Ray is told of its cluster": Sample(
        spec={"workerGroupSpecs": [worker()]},
        check=lambda m: {"RAY_CLUSTER_NAMESPACE", "RAY_USAGE_STATS_KUBERAY_IN_USE"} < set(m.env())
        and "RAY_START_ULIMIT_OPEN_FILES" in m.command(),
    ),
    "probes of a newer Ray": Sample(
        spec={"rayVersion": "2.60.0", "workerGroupSpecs": [worker()]},
        check=lambda m: m.ray()["readinessProbe"]["httpGet"]["path"] == "/api/healthz",
    ),
    "labels of a group, for label selectors": Sample(
        spec={"workerGroupSpecs": [worker(labels={"ray.io/market-type": "spot"})]},
        check=lambda m: "ray.io/market-type=spot" in m.command()
        and m.workers[0]["metadata"]["labels"]["ray.io/market-type"] == "spot",
    ),
    "finalizers, spread and security of the template": Sample(
        spec={
            "workerGroupSpecs": [
                worker(
                    template=pod(
                        meta={"finalizers": ["example.com/kept"]},
                        container={"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}},
                        topologySpreadConstraints=[
                            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
                        ],
                        securityContext={"runAsNonRoot": True},
                        tolerations=[{"key": "gpu", "operator": "Exists"}],
                    )
                )
            ]
        },
        check=lambda m: m.workers[0]["metadata"]["finalizers"] == ["example.com/kept"]
        and m.workers[0]["spec"]["topologySpreadConstraints"][0]["topologyKey"] == "zone"
        and m.ray()["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE"],
    ),
    "TLS by hand": Sample(
        spec={
            "workerGroupSpecs": [
                worker(
                    template=pod(
                        container={
                            "env": [{"name": "RAY_USE_TLS", "value": "1"}],
                            "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
                        },
                        volumes=[{"name": "ca", "secret": {"secretName": "ca"}}],
                    )
                )
            ]
        },
        check=lambda m: m.env()["RAY_USE_TLS"]["value"] == "1",
    ),
    "the autoscaler": Sample(
        spec={
            "enableInTreeAutoscaling": True,
            "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 60, "upscalingMode": "Default"},
            "headGroupSpec": head(**COUNTED),
            "workerGroupSpecs": [worker(**COUNTED)],
        },
        check=lambda m: [c["name"] for c in m.head["spec"]["containers"]] == ["ray", "autoscaler"],
    ),
    "a multi-host slice of TPUs": Sample(
        spec={"workerGroupSpecs": [worker("tpu", 1, 4, template=pod({TPU: "4"}, **TPUS))]},
        workers=4,
        check=lambda m: "headless" in m.services
        and [m.env(w)["TPU_WORKER_ID"]["value"] for w in m.workers] == ["0", "1", "2", "3"],
    ),
    "external Redis": Sample(
        spec={
            "gcsFaultToleranceOptions": {
                "redisAddress": "redis:6379",
                "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
            },
            "workerGroupSpecs": [],
        },
        workers=0,
        check=lambda m: m.env(m.head)["RAY_REDIS_ADDRESS"]["value"] == "redis:6379"
        and m.env(m.head)["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == "redis",
    ),
    "external Redis, as before the field": Sample(
        metadata={"annotations": {"ray.io/ft-enabled": "true", "ray.io/external-storage-namespace": "mine"}},
        spec={
            "headGroupSpec": head(
                pod(container={"env": [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]})
            ),
            "workerGroupSpecs": [],
        },
        workers=0,
        check=lambda m: m.env(m.head)["RAY_external_storage_namespace"]["value"] == "mine",
    ),
    "a token": Sample(
        spec={"authOptions": {"mode": "token"}, "workerGroupSpecs": []},
        workers=0,
        check=lambda m: m.env(m.head)["RAY_AUTH_MODE"]["value"] == "token",
        secret="itself",
    ),
    "a token of the user's": Sample(
        spec={"authOptions": {"mode": "token", "secretName": "own"}, "workerGroupSpecs": []},
        workers=0,
        check=lambda m: m.env(m.head)["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "own",
    ),
    "a queue of YuniKorn's": Sample(
        metadata={"labels": {"ray.io/scheduler-name": "yunikorn", "yunikorn.apache.org/queue": "root.mine"}},
        spec={"workerGroupSpecs": [worker("tpu", 1, 2, template=pod(SMALL))]},
        workers=2,
        check=lambda m: m.workers[0]["spec"]["schedulerName"] == "yunikorn"
        and m.workers[0]["metadata"]["labels"]["queue"] == "root.mine",
    ),
    "an Ingress": Sample(
        spec={"headGroupSpec": head(enableIngress=True), "workerGroupSpecs": []},
        workers=0,
        ignored="spec.headGroupSpec.enableIngress",
    ),
    "an end by itself": Sample(
        spec={"ttlSeconds": 3600, "workerGroupSpecs": []}, workers=0, ignored="spec.ttlSeconds"
    ),
    "a name for every Pod": Sample(
        spec={"podFQDN": {"mode": "DNSOnly"}, "workerGroupSpecs": []}, workers=0, ignored="spec.podFQDN"
    ),
    "a collector of history": Sample(
        spec={"historyServerOptions": {"collectorOptions": {"image": "x"}}, "workerGroupSpecs": []},
        workers=0,
        ignored="spec.historyServerOptions",
    ),
    "mutual TLS": Sample(spec={"tlsOptions": {}}, refused="spec.tlsOptions"),
    "a network policy": Sample(spec={"networkPolicy": {"mode": "DenyAll"}}, refused="spec.networkPolicy"),
    "network isolation": Sample(
        spec={"networkIsolation": {"mode": "DenyAll"}}, refused="spec.networkIsolation"
    ),
    "the head's state in a volume": Sample(
        spec={"gcsFaultToleranceOptions": {"backend": "rocksdb", "storage": {"size": "1Gi"}}},
        refused="spec.gcsFaultToleranceOptions.backend",
    ),
    "the autoscaler of before": Sample(
        spec={
            "enableInTreeAutoscaling": True,
            "autoscalerOptions": {"version": "v1"},
            "headGroupSpec": head(**COUNTED),
            "workerGroupSpecs": [worker(**COUNTED)],
        },
        refused="spec.autoscalerOptions.version",
    ),
}  # fmt: skip
