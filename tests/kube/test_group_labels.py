"""What the autoscaler reads of TPU groups: their shape, from the node selectors that they have anyway."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.kube.grouplabels import change
from everstep.kube.spec import ClusterSpec, parse
from everstep.testing.kube import ApiServer
from kube.live import Namespace, operating
from kube.test_slices import cluster as manifest
from kube.world import group, template

SHAPE = {
    "ray.io/tpu-topology": "4x4",
    "ray.io/tpu-pod-type": "v6e-16",
    "ray.io/accelerator-type": "TPU-V6E",
}


def tpus(**more: object) -> dict[str, object]:
    made = template()
    made["spec"]["nodeSelector"] = {
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    }
    return group(template=made, replicas=0, rayStartParams={"num-cpus": "1"}, **more)


def read(*groups: dict[str, object], autoscaling: bool = True) -> ClusterSpec:
    raw = manifest(*groups, enableInTreeAutoscaling=autoscaling)
    raw["metadata"].update(uid="u", namespace="n")
    return parse(raw)


def labelled(*groups: dict[str, object], autoscaling: bool = True) -> dict[str, dict[str, str]]:
    found = change(read(*groups, autoscaling=autoscaling), "7")
    assert not found or found[0] == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    return {step["path"]: step["value"] for step in found[1:]}


def test_groups_of_tpus_are_labelled_with_their_shape() -> None:
    cpus = group(groupName="cpu")
    assert labelled(cpus, tpus()) == {"/spec/workerGroupSpecs/1/labels": SHAPE}


def test_what_the_user_wrote_stays() -> None:
    own = {"ray.io/accelerator-type": "mine", "zone": "a"}
    assert labelled(tpus(labels=own)) == {"/spec/workerGroupSpecs/0/labels": {**SHAPE, **own}}


@pytest.mark.parametrize("autoscaling", [True, False])
def test_nothing_is_written_where_nothing_is_missing_or_nobody_reads_it(autoscaling: bool) -> None:
    assert labelled(tpus(labels=SHAPE), autoscaling=autoscaling) == {}
    assert labelled(tpus(), autoscaling=False) == {}


def test_the_operator_labels_groups_of_a_real_cluster(server: ApiServer, tmp_path: Path) -> None:
    space = Namespace(server)
    head = {"template": template(), "rayStartParams": {"num-cpus": "0"}}
    with operating(server, tmp_path, "--namespace", space.name):
        space.create(manifest(tpus(), enableInTreeAutoscaling=True, headGroupSpec=head))
        space.see(lambda: space.cluster()["spec"]["workerGroupSpecs"][0].get("labels") == SHAPE, "the labels")
        space.see(lambda: len(space.pods()) == 1, "the head")
