"""Whatever is in a manifest, it is refused with a reason or can be run: none can stop the operator."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings, strategies as st

from everstep.kube import status
from everstep.kube.actions import CreateReplica
from everstep.kube.reconcile import Observed, reconcile
from everstep.kube.spec import parse
from everstep.kube.validation import problems, unsupported
from kube.world import group, manifest, template

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2**31),
    st.floats(allow_nan=False),
    st.sampled_from(["", "x", "4x4", "0", "-1", "1e99", "9" * 5000, "²", "true", "\n", "a,b='\""]),
    st.just([]),
    st.just({}),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just({})), min_size=1, max_size=2),
    st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.just({})), max_size=2),
)


def full() -> dict[str, Any]:
    """A manifest in which everything is that the operator reads."""
    pod = template(
        nodeSelector={
            "cloud.google.com/gke-tpu-topology": "4x4",
            "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        },
        volumes=[{"name": "data", "emptyDir": {}}],
        initContainers=[{"name": "first", "image": "x"}],
        restartPolicy="Never",
        serviceAccountName="somebody",
    )
    pod["metadata"] = {"labels": {"a": "b"}, "annotations": {"everstep.dev/restart-policy": "Replica"}}
    pod["spec"]["containers"][0].update(
        args=["echo hello"],
        env=[{"name": "A", "value": "b"}],
        ports=[{"name": "gcs", "containerPort": 6379}],
        resources={"limits": {"cpu": "4", "memory": "8Gi", "google.com/tpu": 4}},
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
    )
    slices = group(template=pod, rayStartParams={"num-cpus": "4"}, labels={"zone": "here"})
    slices["scaleStrategy"] = {"workersToDelete": ["somebody"]}
    raw = manifest(
        slices,
        group("plain", 1, 1, resources={"CPU": "2"}),
        enableInTreeAutoscaling=True,
        autoscalerOptions={"version": "v2", "env": [{"name": "A", "value": "b"}], "idleTimeoutSeconds": 5},
        managedBy="everstep.dev/operator",
        headServiceAnnotations={"a": "b"},
        upgradeStrategy={"type": "None"},
    )
    raw["spec"]["headGroupSpec"] = {
        "template": copy.deepcopy(pod),
        "rayStartParams": {"port": "6380", "dashboard-port": "8265", "metrics-export-port": "8080"},
        "headService": {"metadata": {"labels": {"a": "b"}}, "spec": {"type": "ClusterIP"}},
        "serviceType": "ClusterIP",
    }
    return raw


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inside:
        yield (*path, key)
        yield from places(below, (*path, key))


def run(raw: dict[str, Any]) -> None:
    cluster = parse(raw)
    plan = reconcile(cluster, Observed(pods=[]), 1000.0)
    json.dumps([a.manifests(cluster) for a in plan.actions if isinstance(a, CreateReplica)][:3])
    json.dumps(status.describe(cluster, Observed(pods=[]), unsupported(raw), {}, 1000.0))


def test_the_whole_one_is_run() -> None:
    assert problems(full()) == []
    assert unsupported(full()) == []
    run(full())


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_any_other_is_refused_with_a_reason_or_run(data: st.DataObject) -> None:
    raw = full()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(places(raw["spec"]), key=repr)))
        at: Any = raw["spec"]
        for key in path[:-1]:
            at = at[key]
        if data.draw(st.booleans()):
            at[path[-1]] = data.draw(JUNK)
        else:
            del at[path[-1]]
        if not raw["spec"]:
            break
    wrong = problems(raw)
    assert all(problem.path and problem.seen and problem.remedy for problem in wrong)
    if not wrong:
        run(raw)
    else:
        status.refuse(wrong, 1, {}, 1000.0)
